"""Find raw shards of text (JSON Lines and Parquet) and cut them into spans.

One rank reads a span at a time: about 16 MB of plain JSON Lines or of Parquet row groups, or a
whole file if it is compressed or not fetched yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from lib.core import commands, data_names, hashing, log, placeholders, units
from lib.core.data_names import TEST, VALIDATION
from lib.core.errors import ArtifactError, UsageError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_EXPECTED = "JSON Lines (.jsonl .ndjson .json, also with .gz .bz2 .xz .zst) or Parquet (.parquet)"
_PREPARED = ("dataset_info.json", "dataset_dict.json")
_NAMED = 5
_SPAN_BYTES = 16 << 20
_ENDS_BYTES = 64 << 10


class Span(NamedTuple):
    """Names a part of a shard.

    path: relative to the root. start, end: bytes of JSON Lines, or row groups of Parquet. A line
    belongs to the span in which it begins. end None: up to the end of the file.
    """

    path: str
    start: int = 0
    end: int | None = None


class Fetcher(Protocol):
    """Fetches shards in the order of the requests, in the background."""

    def send(self, path: str) -> None: ...
    def receive(self) -> Path: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RawShards:
    """Describes the text files that --streaming reads, cut into spans.

    root: their directory. fetcher: fetches the files, None if they are local. fingerprint:
    identifies the content, independent of the path. bytes: the total size of the files. commit: the
    commit of the repository, "" for local files.
    """

    name: str
    root: Path
    spans: list[Span]
    fingerprint: str
    bytes: int
    commit: str = ""
    fetcher: Fetcher | None = None

    def __str__(self) -> str:
        files = len({span.path for span in self.spans})
        return (
            f"{self.name}, {units.counted(files, 'file')} in "
            f"{units.counted(len(self.spans), 'piece')}, "
            f"{units.size(self.bytes)}, streamed"
        )


def is_json_lines(path: str) -> bool:
    """Return whether a file name has a suffix of JSON Lines, compressed or not."""
    name = PurePosixPath(path.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSIONS else name).suffix in _JSON_LINES


def is_shard(path: str) -> bool:
    """Return whether a file name has a suffix of a readable shard."""
    return is_json_lines(path) or path.lower().endswith(".parquet")


def open_directory(root: Path) -> RawShards:
    """Return the shards of a directory tree, or a single file as a shard.

    Raises ArtifactError if the path does not exist, or for pointers and error pages. Raises
    UsageError if it contains no shard, or is a prepared dataset, which needs no streaming.
    """
    if not root.exists():
        raise ArtifactError(f"{root} does not exist", expected=f"a directory with {_EXPECTED}")
    if any((root / mark).exists() for mark in _PREPARED):
        raise UsageError(
            f"{root} is a prepared dataset", run=commands.as_typed(drop=["--streaming"])
        )
    base, listed = (
        (root.parent, [root.name]) if root.is_file() else (root, sorted(_list_files(root)))
    )
    paths = [path for path in listed if is_shard(path)]
    if not root.is_file():
        descriptions = data_names.find_descriptions(listed, lambda path: True)
        paths = _select_training_data(str(root), [p for p in paths if p not in descriptions])
    if not paths:
        raise UsageError(
            f"no shard in {root}",
            expected=_EXPECTED,
            found=", ".join(listed[:8]) or "no files",
            hint="stages 01 and 02 read any kind of text",
        )
    placeholders.require_data((base / path for path in paths), str(root))
    _warn_about_other_files(str(root), listed, len(paths))
    spans = [span for path in paths for span in _cut_shard(base, path)]
    sizes = [(base / path).stat().st_size for path in paths]
    contents = [
        [path, size, hashing.ends_digest(base / path, _ENDS_BYTES, "sha256")]
        for path, size in zip(paths, sizes, strict=True)
    ]
    return RawShards(str(root), base, spans, hashing.fingerprint(contents), sum(sizes))


def open_repository(
    name: str, commit: str, sizes: dict[str, tuple[int, str]], root: Path, fetcher: Fetcher
) -> RawShards:
    """Return the shards of a repository, one span per file.

    sizes: path → bytes and digest. Raises UsageError if the repository contains no shard.
    """
    paths = _select_training_data(name, sorted(filter(is_shard, sizes)))
    if not paths:
        raise UsageError(
            f"no shard in {name}",
            expected=_EXPECTED,
            found=", ".join(sizes)[:200],
            hint=f"-d {name}/GLOB chooses other files",
        )
    _warn_about_other_files(name, sorted(sizes), len(paths))
    fingerprint = hashing.fingerprint([[path, *sizes[path]] for path in paths])
    return RawShards(
        name,
        root,
        [Span(path) for path in paths],
        fingerprint,
        sum(sizes[path][0] for path in paths),
        commit,
        fetcher,
    )


def _select_training_data(name: str, paths: list[str]) -> list[str]:
    """Return the shards that are not named as validation or test data, and print the others."""
    roles = data_names.assign_roles(paths)
    held_out = [path for path in paths if roles.get(path) in (VALIDATION, TEST)]
    if held_out and len(held_out) == len(paths):
        raise UsageError(
            f"the names in {name} say that it contains no training data",
            found=units.join_names(held_out, _NAMED),
            hint="a single file is read whatever its name is",
        )
    if held_out and log.rank() == 0:
        log.info(
            f"{units.counted_are(len(held_out), 'file')} named as validation or test data and not "
            f"read: {units.join_names(held_out, _NAMED)}"
        )
    return [path for path in paths if roles.get(path) not in (VALIDATION, TEST)]


def _warn_about_other_files(name: str, paths: list[str], count: int) -> None:
    """Warn on rank 0 about the files that are not read."""
    others = [path for path in paths if not is_shard(path)]
    if others and log.rank() == 0:
        shown = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        log.warn(
            f"--streaming reads {count:,} of the {units.counted(len(paths), 'file')} in {name}. "
            f"{len(others):,} are skipped: their names are neither those of JSON Lines nor of "
            f"Parquet: {shown} (stages 01 and 02 read any kind of text)"
        )


def _list_files(root: Path) -> Iterator[str]:
    """Yield the relative paths of all files except hidden ones."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if not name.startswith(".")
        )


def _cut_shard(root: Path, path: str) -> list[Span]:
    if path.lower().endswith(".parquet"):
        return _cut_parquet(root, path)
    if not path.lower().endswith(_JSON_LINES):
        return [Span(path)]
    size = (root / path).stat().st_size
    return [
        Span(path, start, min(start + _SPAN_BYTES, size)) for start in range(0, size, _SPAN_BYTES)
    ]


def _cut_parquet(root: Path, path: str) -> list[Span]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(root / path)
    except (OSError, ValueError):
        return [Span(path)]  # reading it will report the damage
    spans = []
    start = 0
    size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= _SPAN_BYTES or group == metadata.num_row_groups - 1:
            spans.append(Span(path, start, group + 1))
            start = group + 1
            size = 0
    return spans
