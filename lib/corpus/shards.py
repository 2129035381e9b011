"""Lays parts one after another into shards that `datasets.load_from_disk` opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lib.core import hashing, manifest
from lib.core.errors import ArtifactError
from lib.corpus import parts

SHARD_BYTES = 500_000_000
_CHUNK = 1 << 22


@dataclass
class Shard:
    """A finished shard. digest: of the whole file."""

    path: Path
    rows: int
    bytes: int
    digest: str


class ShardWriter:
    """Writes one split of a dataset: shards of about 500 MB, in the order of the parts.

    directory: of the split. `finish` gives the shards their names and writes the JSON files.
    """

    def __init__(self, directory: Path, split: str, keep_source: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.shards: list[Shard] = []
        self.rows = self.text_bytes = 0
        self._directory, self._split = directory, split
        self._schema = parts.schema(keep_source)
        self._file: BinaryIO | None = None

    def append(self, part: Path, rows: int, text_bytes: int) -> None:
        """Append a part and delete it."""
        size = part.stat().st_size
        if self._file and self._rows and self._bytes + size > SHARD_BYTES:
            self._close()
        if rows:
            if self._file is None:
                self._open()
            with part.open("rb", buffering=0) as source:
                while chunk := source.read(_CHUNK):
                    self._write(chunk)
            self._rows += rows
            self.rows += rows
            self.text_bytes += text_bytes
        part.unlink()

    def finish(self) -> list[dict[str, Any]]:
        """Close, name and verify the shards; return the manifest entries of all files."""
        if self._file is None and not self.shards:
            self._open()  # a split without rows is one empty shard
        if self._file:
            self._close()
        for number, shard in enumerate(self.shards):
            name = f"data-{number:05d}-of-{len(self.shards):05d}.arrow"
            shard.path = shard.path.rename(self._directory / name)
            _verify(shard)
        info, state = self._directory / "dataset_info.json", self._directory / "state.json"
        manifest.write_json(info, self._info())
        manifest.write_json(state, self._state())
        root = self._directory
        return [{"path": shard.path.name, "bytes": shard.bytes, "digest": shard.digest}
                for shard in self.shards] + [manifest.file_entry(root, info),
                                             manifest.file_entry(root, state)]

    def summary(self) -> dict[str, Any]:
        """Return what later stages want to know: rows, bytes of text, and rows per shard."""
        return {"rows": self.rows, "text_bytes": self.text_bytes,
                "shards": [{"path": shard.path.name, "rows": shard.rows} for shard in self.shards]}

    def close(self) -> None:
        """Let go of a shard that will not be finished."""
        if self._file:
            self._file.close()

    def _open(self) -> None:
        self._file = (self._directory / f"data-{len(self.shards):05d}.unfinished").open("wb", 0)
        self._hasher = hashing.new()
        self._rows = self._bytes = 0
        self._write(self._schema.serialize().to_pybytes())

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # an unbuffered write may take only a part
            view = view[self._file.write(view):]
        self._hasher.update(data)
        self._bytes += len(data)

    def _close(self) -> None:
        self._write(parts.END_OF_STREAM)
        path = Path(self._file.name)
        self._file.close()
        self._file = None
        self.shards.append(Shard(path, self._rows, self._bytes, hashing.digest(self._hasher)))

    def _info(self) -> dict[str, Any]:
        features = {name: {"dtype": str(self._schema.field(name).type), "_type": "Value"}
                    for name in self._schema.names}
        split = {"name": self._split, "num_bytes": self.text_bytes, "num_examples": self.rows}
        return {"description": "", "citation": "", "homepage": "", "license": "",
                "features": features, "splits": {self._split: split}}

    def _state(self) -> dict[str, Any]:
        # datasets keys its caches by the fingerprint: it must change with the content.
        fingerprint = hashing.fingerprint([shard.digest for shard in self.shards])
        return {"_data_files": [{"filename": shard.path.name} for shard in self.shards],
                "_fingerprint": fingerprint, "_format_columns": None, "_format_kwargs": {},
                "_format_type": None, "_output_all_columns": False, "_split": self._split}


def _verify(shard: Shard) -> None:
    """Read a shard back; ArtifactError when rows are missing.

    A stream cut between two batches opens without complaint, so rows are counted.
    """
    import pyarrow as pa
    with pa.memory_map(str(shard.path)) as file, pa.ipc.open_stream(file) as stream:
        rows = sum(batch.num_rows for batch in stream)
    if rows != shard.rows or shard.path.stat().st_size != shard.bytes:
        raise ArtifactError(f"{shard.path} did not reach the disk as it was written",
                            expected=f"{shard.rows:,} rows", found=f"{rows:,} rows")
