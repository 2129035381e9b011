"""Concatenate parts into shards that `datasets.load_from_disk` opens.

A thread syncs the shards while the next parts are written, so disk and parsers work in parallel.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, manifest
from lib.core.errors import ArtifactError
from lib.core.hashing import HashedFile
from lib.corpus import parts

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

SHARD_BYTES = 500_000_000
_SYNC_BYTES = 64_000_000  # a shard is synced several times before it is full
_CHUNK = 1 << 20
_MAX_WAITING = 4  # with more pending syncs, the writer waits for the disk
_UNFINISHED = "data-{:05d}.unfinished"


class Flusher:
    """Syncs files and runs other work in one thread, in the order of the calls.

    An error in the thread, such as a full disk, is raised by a later call.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def sync(self, file: io.IOBase) -> None:
        """Sync the current content of a file; the caller may close the file meanwhile."""
        descriptor = os.dup(file.fileno())

        def work() -> None:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

        self.then(work)

    def then(self, work: Callable[[], None]) -> None:
        """Queue a function that the thread calls after all earlier work."""
        self._waiting.append(self._thread.submit(work))
        while len(self._waiting) > _MAX_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Wait until all work is done."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread after its pending work; errors of that work are ignored."""
        self._thread.shutdown(wait=True)


@dataclass
class Shard:
    """Describes a shard. rows, text_bytes: written so far. digest: "" until it is finished."""

    name: str
    rows: int = 0
    text_bytes: int = 0
    bytes: int = 0
    digest: str = ""


class ShardWriter:
    """Writes one split of a dataset: shards of about 500 MB, in the order of the parts.

    directory: directory of the split. shards: to continue a stopped run, the result of its `state`.
    `finish` renames the shards and writes the JSON files.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        schema: pa.Schema,
        flusher: Flusher,
        shards: Iterable[dict[str, Any]] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.shards = [Shard(**shard) for shard in shards]
        self._directory = directory
        self._split = split
        self._schema = schema
        self._flusher = flusher
        self._file: HashedFile | None = None
        self._unsynced = 0
        if self.shards and not self.shards[-1].digest:
            self._reopen()

    @property
    def rows(self) -> int:
        """Return the number of rows so far."""
        return sum(shard.rows for shard in self.shards)

    def state(self) -> list[dict[str, Any]]:
        """Return the state from which a later run can continue, and sync the open shard."""
        if self._file:
            self._flusher.sync(self._file)
        return [asdict(shard) for shard in self.shards]

    def append(
        self,
        part: Path,
        rows: int,
        text_bytes: int,
        is_kept: np.ndarray | None = None,
        lines_before: int = 0,
    ) -> None:
        """Append a part.

        is_kept: the rows to write (bool [rows]; None: all). lines_before: number to add to the
        column `line`.
        """
        if not rows or (is_kept is not None and not is_kept.any()):
            return
        size = part.stat().st_size
        if self._file and self.shards[-1].rows and self.shards[-1].bytes + size > SHARD_BYTES:
            self._close(self._file)
        file = self._file or self._open()
        shard = self.shards[-1]
        if is_kept is None and not lines_before:
            for chunk in _read_chunks(part):
                self._write(file, chunk)
        else:
            rows = rows if is_kept is None else int(is_kept.sum())
            text_bytes = 0
            for message, length in parts.rewrite_part(part, self._schema, is_kept, lines_before):
                self._write(file, message)
                text_bytes += length
        shard.rows += rows
        shard.text_bytes += text_bytes

    def finish(self) -> list[dict[str, Any]]:
        """Close, rename and verify the shards; return the manifest entries of all files."""
        if not self.shards:
            self._open()  # a split without rows has one empty shard
        if self._file:
            self._close(self._file)
        self._flusher.wait()
        for number, shard in enumerate(self.shards):
            name = f"data-{number:05d}-of-{len(self.shards):05d}.arrow"
            path = (self._directory / shard.name).rename(self._directory / name)
            shard.name = name
            _verify_shard(path, shard)
        info = self._directory / "dataset_info.json"
        state = self._directory / "state.json"
        manifest.write_json(info, self._make_info())
        manifest.write_json(state, self._make_state())
        root = self._directory
        return [
            {"path": shard.name, "bytes": shard.bytes, "digest": shard.digest}
            for shard in self.shards
        ] + [manifest.file_entry(root, info), manifest.file_entry(root, state)]

    def summary(self) -> dict[str, Any]:
        """Return the summary for later stages: rows, bytes of text, and rows per shard."""
        return {
            "rows": self.rows,
            "text_bytes": sum(shard.text_bytes for shard in self.shards),
            "shards": [{"path": shard.name, "rows": shard.rows} for shard in self.shards],
        }

    def close(self) -> None:
        """Close the open shard without finishing it."""
        if self._file:
            self._file.close()

    def _open(self) -> HashedFile:
        self.shards.append(Shard(_UNFINISHED.format(len(self.shards))))
        self._file = HashedFile(self._directory / self.shards[-1].name, buffering=0)
        self._write(self._file, self._schema.serialize())
        return self._file

    def _reopen(self) -> None:
        shard = self.shards[-1]
        self._file = HashedFile(self._directory / shard.name, keep=shard.bytes, buffering=0)

    def _write(self, file: HashedFile, data: Any) -> None:
        self._unsynced += file.write(data)
        self.shards[-1].bytes = file.bytes
        if self._unsynced > _SYNC_BYTES:
            self._flusher.sync(file)
            self._unsynced = 0

    def _close(self, file: HashedFile) -> None:
        self._write(file, parts.END_OF_STREAM)
        self._flusher.sync(file)
        file.close()
        self._file = None
        self.shards[-1].digest = file.digest()

    def _make_info(self) -> dict[str, Any]:
        features = {field.name: _describe_feature(field.type) for field in self._schema}
        split = {
            "name": self._split,
            "num_bytes": self.summary()["text_bytes"],
            "num_examples": self.rows,
        }
        return {
            "description": "",
            "citation": "",
            "homepage": "",
            "license": "",
            "features": features,
            "splits": {self._split: split},
        }

    def _make_state(self) -> dict[str, Any]:
        # The library uses the fingerprint as a cache key, so it must change with the content.
        fingerprint = hashing.fingerprint([shard.digest for shard in self.shards])
        return {
            "_data_files": [{"filename": shard.name} for shard in self.shards],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self._split,
        }


def _describe_feature(kind: Any) -> dict[str, Any]:
    """Return the description of an Arrow type in the features of `datasets`."""
    import pyarrow as pa

    if pa.types.is_large_list(kind):
        return {"feature": _describe_feature(kind.value_type), "_type": "LargeList"}
    if pa.types.is_struct(kind):
        return {field.name: _describe_feature(field.type) for field in kind}
    return {"dtype": {"float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def restore_names(directory: Path) -> None:
    """Undo the renaming of `finish`, for a run that was killed after it."""
    for path in directory.rglob("data-*-of-*.arrow"):
        path.rename(path.with_name(_UNFINISHED.format(int(path.name.split("-")[1]))))


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as source:
        while chunk := source.read(_CHUNK):
            yield chunk


def _verify_shard(path: Path, shard: Shard) -> None:
    """Read a shard back; raises ArtifactError if rows are missing.

    A stream that is cut between two batches opens without an error, so the rows are counted.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        rows = sum(batch.num_rows for batch in stream)
    if rows != shard.rows or path.stat().st_size != shard.bytes:
        raise ArtifactError(
            f"{path} on disk differs from the data written",
            expected=f"{shard.rows:,} rows",
            found=f"{rows:,} rows",
        )
