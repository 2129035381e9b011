"""List the files of a source tree, and the reason why each skipped file is skipped."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import data_names, log, manifest, partial_dirs, units
from lib.core.errors import UsageError, is_of_disk
from lib.core.paths import Experiment, escape_path
from lib.core.progress import Progress
from lib.corpus import saved

HIDDEN = "hidden"
EMPTY = "empty"
SPECIAL = "special"
UNREADABLE = "unreadable"
DANGLES = "link dangles"
LOOPS = "link loops"
OUTSIDE = "link leads outside"
INSIDE = "link inside the source"
PATTERN = "pattern"
OWN_OUTPUT = "output of this stage"
ARTIFACT = "made by a stage"
DESCRIPTION = "describes a dataset"
HUB_CACHE = "in the Hub's cache, not in the snapshot"
_NAMED = 5
_CARD_BYTES = 1 << 16
# The front matter of a data card of the Hub; other Markdown may have front matter with other keys.
_DATA_CARD = re.compile(
    rb"\s*---\s*\n(?:(?!---).*\n)*?"
    rb"(?:dataset_info|configs|task_categories|task_ids|size_categories|"
    rb"annotations_creators|language_creators|source_datasets|pretty_name):"
)
# Artifacts in which the scan looks for no raw files, and their names in messages.
_ARTIFACT_NAMES = {
    "dataset": "dataset",
    "dataset-parts": "dataset part",
    "curation-part": "part of a curated dataset",
    "tokens": "token store",
    "packs": "token store",
    "model": "model",
    "scratch": "model",
    "export": "model",
    "checkpoint": "checkpoint",
    "bundle": "bundle",
}


@dataclass(slots=True)
class TreeEntry:
    """Describes a file of the source tree, or a directory that is not entered.

    path: relative to the source, with `/` between parts and at the end of a directory. Bytes that
    are not UTF-8 are surrogates, which os.fsencode converts back. mtime_ns: modification time in
    nanoseconds. skipped: why the entry is skipped, "" if it is taken. kind: format of the content,
    "" until it is known.
    """

    path: str
    bytes: int = 0
    mtime_ns: int = 0
    skipped: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Rules:
    """Defines which files a scan takes. A glob matches the relative path or the basename."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    follow_symlinks: bool = False


_Identity = tuple[int, int]  # device and inode of a directory


class Scan:
    """Walks through a source tree once; `entries()` yields the entries in arbitrary order.

    output: a directory that the walk must not enter.
    """

    def __init__(self, root: Path, rules: Rules, output: Path | None = None) -> None:
        self.root = root.resolve()
        self.rules = rules
        self._include = _compile_globs(rules.include)
        self._exclude = _compile_globs(rules.exclude)
        self._output = str(output.resolve()) if output else None

    def entries(self) -> Iterator[TreeEntry]:
        """Walk the tree; raises OSError only if a disk fails or the root cannot be read."""
        stack: list[tuple[str, _Identity, tuple[_Identity, ...]]] = [
            ("", _get_directory_id(self.root.stat()), ())
        ]
        while stack:
            prefix, directory_id, above = stack.pop()
            above = (*above, directory_id)
            try:
                listing = os.scandir(self.root / prefix)
            except OSError as error:
                if not prefix or is_of_disk(error):
                    raise
                yield TreeEntry(prefix, skipped=UNREADABLE)
                continue
            with listing:
                for item in listing:
                    result = self._examine(item, prefix + item.name, above)
                    if isinstance(result, TreeEntry):
                        yield result
                    else:
                        stack.append((prefix + item.name + "/", result, above))

    def _examine(
        self, item: os.DirEntry, path: str, above: tuple[_Identity, ...]
    ) -> TreeEntry | _Identity:
        """Return an entry, or the identity of a directory to enter."""
        try:
            info = item.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode) and not item.name.startswith("."):
                if reason := self._explain_skipped_link(item):
                    return TreeEntry(path, skipped=reason)
                info = item.stat()
        except OSError as error:
            if is_of_disk(error) and not (self._exclude and _matches_path(self._exclude, path)):
                raise
            reason = {errno.ENOENT: DANGLES, errno.ELOOP: LOOPS}.get(error.errno or 0, UNREADABLE)
            return TreeEntry(path, skipped=reason)
        if not stat.S_ISDIR(info.st_mode):
            reason = self._explain_skipped_file(item.name, path, info)
            return TreeEntry(path, info.st_size, info.st_mtime_ns, reason)
        reason = self._explain_skipped_directory(item, path, info, above)
        return TreeEntry(path + "/", skipped=reason) if reason else _get_directory_id(info)

    def _explain_skipped_link(self, item: os.DirEntry) -> str:
        target = os.path.realpath(item.path, strict=True)
        if self.rules.follow_symlinks or _is_hub_blob(item.path, target):
            return ""
        # The scan finds the target of a link inside the source by its own name. Taking the link
        # too would train on the same text twice.
        return INSIDE if Path(target).is_relative_to(self.root) else OUTSIDE

    def _explain_skipped_file(self, name: str, path: str, info: os.stat_result) -> str:
        if name.startswith("."):
            return HIDDEN
        if not stat.S_ISREG(info.st_mode):
            return SPECIAL
        excluded = self._exclude and _matches_path(self._exclude, path)
        if excluded or (self._include and not _matches_path(self._include, path)):
            return PATTERN
        if saved.is_description(self.root, path):
            return DESCRIPTION
        return "" if info.st_size else EMPTY

    def _explain_skipped_directory(
        self, item: os.DirEntry, path: str, info: os.stat_result, above: tuple
    ) -> str:
        if item.name.startswith("."):
            return HIDDEN
        if not _belongs_to_snapshot(Path(item.path)):
            return HUB_CACHE
        if item.path == self._output or partial_dirs.is_ours(Path(item.path)):
            return OWN_OUTPUT
        if manifest.read_kind(Path(item.path)).startswith("splits/"):
            return OWN_OUTPUT  # splits of an earlier run contain the same files again
        if recognise_artifact(Path(item.path)):
            return ARTIFACT  # its text comes from other files, or it contains no text
        if self._exclude and _matches_path(self._exclude, path):
            return PATTERN
        return LOOPS if _get_directory_id(info) in above else ""


def recognise_artifact(directory: Path) -> str:
    """Return the name of the artifact in a directory (`dataset`, `run`, …), "" for raw files."""
    run = Experiment(directory.parent, directory.name)
    if run.config.is_file() and run.state.is_file():
        return "run"
    name, version, _ = manifest.read_kind(directory).partition("/")
    return _ARTIFACT_NAMES.get(name, "") if version else ""


def _is_hub_blob(link: str, target: str) -> bool:
    """Return whether a link in a snapshot of the Hub's cache leads to a file of its repository.

    Layout: `datasets--org--name/snapshots/<commit>/<path>` links to `datasets--org--name/blobs/…`.
    """
    starts = (match.start() for match in re.finditer("/snapshots/", link))
    return any(target.startswith(f"{link[:start]}/blobs/") for start in starts)


def _belongs_to_snapshot(directory: Path) -> bool:
    """Return False for the parts of a repository in the Hub's cache that contain its files again.

    These are the blobs, the refs and all snapshots but that of the branch `main`. Raises UsageError
    if there are several snapshots and none is that of `main`.
    """
    if _is_hub_repository(directory.parent):
        return directory.name not in ("blobs", "refs")
    snapshots = directory.parent
    if snapshots.name != "snapshots" or not _is_hub_repository(snapshots.parent):
        return True
    revisions = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if len(revisions) == 1:
        return True
    with suppress(OSError):
        main = (snapshots.parent / "refs/main").read_text(encoding="utf-8", errors="replace")
        if snapshots / main.strip() in revisions:
            return directory.name == main.strip()
    raise UsageError(
        f"{snapshots} contains several revisions of a dataset, and `main` is none of them",
        found=", ".join(path.name for path in revisions),
        expected=f"one of them as the input, such as {revisions[-1]}",
    )


def _is_hub_repository(directory: Path) -> bool:
    return (
        directory.name.startswith("datasets--")
        and (directory / "blobs").is_dir()
        and (directory / "snapshots").is_dir()
    )


def _get_directory_id(info: os.stat_result) -> _Identity:
    return info.st_dev, info.st_ino


def _compile_globs(globs: Iterable[str]) -> re.Pattern[str] | None:
    """Compile globs; `*` also matches `/`, and a leading `**/` also the empty string."""
    globs = [glob.removeprefix("./").rstrip("/") for glob in globs]
    globs += [glob.removeprefix("**/") for glob in globs if glob.startswith("**/")]
    return re.compile("|".join(map(fnmatch.translate, globs))) if globs else None


def _matches_path(pattern: re.Pattern[str], path: str) -> bool:
    return bool(pattern.match(path) or pattern.match(path.rpartition("/")[2]))


def list_unmatched(
    globs: Iterable[str], entries: Iterable[TreeEntry], skipped: str = ""
) -> list[str]:
    """Return the globs that match no entry with the skip reason `skipped` ("": no taken entry)."""
    unmatched = {glob: pattern for glob in globs if (pattern := _compile_globs([glob]))}
    for entry in entries:
        if not unmatched:
            break
        if entry.skipped == skipped:
            path = entry.path.rstrip("/")
            unmatched = {
                glob: pattern
                for glob, pattern in unmatched.items()
                if not _matches_path(pattern, path)
            }
    return list(unmatched)


def scan_tree(
    root: Path, rules: Rules, output: Path | None = None, progress: bool = False
) -> list[TreeEntry]:
    """Return all entries of a source tree, sorted by the bytes of their path."""
    entries = []
    with Progress("scan", None, "entries", progress) as bar:
        for entry in Scan(root, rules, output).entries():
            entries.append(entry)
            bar.advance()
    entries.sort(key=lambda entry: os.fsencode(entry.path))
    _skip_descriptions(root, entries)
    return entries


def _skip_descriptions(root: Path, entries: Sequence[TreeEntry]) -> None:
    """Skip the files that describe the data beside them, and print their names."""

    def is_card(path: str) -> bool:
        try:
            with (root / path).open("rb") as file:
                return bool(_DATA_CARD.match(file.read(_CARD_BYTES)))
        except OSError:
            return False  # the reader reports it

    taken = {entry.path: entry for entry in select_taken(entries)}
    for path in (names := sorted(data_names.find_descriptions(taken, is_card))):
        taken[path].skipped = DESCRIPTION
    if names:
        shown = units.join_names([escape_path(name) for name in names], _NAMED)
        log.info(f"left out, since they describe the data and are no documents: {shown}")


def count_files(directory: str) -> int:
    """Return the number of files in a tree; 0 if it does not exist."""
    return sum(len(files) for _, _, files in os.walk(directory))


def select_taken(entries: Iterable[TreeEntry]) -> list[TreeEntry]:
    """Return the entries that are not skipped."""
    return [entry for entry in entries if not entry.skipped]


def count_reasons(entries: Iterable[TreeEntry]) -> str:
    """Return the reasons for skipping, the most frequent first, such as `3 hidden, 1 empty`."""
    counts = Counter(entry.skipped for entry in entries if entry.skipped)
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


def identify_files(files: Iterable[Any]) -> dict[str, object]:
    """Return the identity of a set of files: count, bytes and a fingerprint.

    files: in a fixed order. The fingerprint covers each relative path, size and modification time,
    and does not depend on the directory.
    """
    hasher = hashlib.sha256()
    count = 0
    total = 0
    for file in files:
        hasher.update(b"%b\0%d\0%d\0" % (os.fsencode(file.path), file.bytes, file.mtime_ns))
        count = count + 1
        total = total + file.bytes
    return {"files": count, "bytes": total, "fingerprint": hasher.hexdigest()[:16]}
