"""Number the rows of a build in two passes, and collect their sidecars on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.core.data_names import find_source
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import SOURCE, RowOptions
from lib.corpus.work_units import UnitResult
from lib.curate import words
from lib.curate.near import minhash
from lib.curate.near.signatures import EarlierDataset, ShardRows

if TYPE_CHECKING:
    import numpy as np


class RowRange(NamedTuple):
    """Describes consecutive rows in one file: a part, or a shard of an earlier dataset.

    first: number of the first row in the build. shard: which rows of a shard are numbered; None for
    a part, in which every row has a number. digest: of a part.
    """

    first: int
    rows: int
    path: Path
    shard: ShardRows | None = None
    digest: str = ""

    @property
    def is_shard(self) -> bool:
        """Return whether the file is a shard."""
        return self.shard is not None

    def row_numbers(self, documents: np.ndarray) -> np.ndarray:
        """Return the row numbers in the file of some documents (int64)."""
        rows = documents - self.first
        return rows if self.shard is None else self.shard.list_rows(rows)


def read_sidecar(path: Path, rows: int, dtype: Any) -> np.ndarray:
    """Return the values of a sidecar, [rows, values of dtype per row]."""
    import numpy as np

    return np.fromfile(path, dtype).reshape(rows, -1)


class Collector:
    """Collects the sidecars of all rows: places, and if needed scores, digests and keys by band.

    rows: number of rows so far. not_compared: number of rows without a key. ranges: the files with
    the rows. is_writing: whether to write the sidecars; otherwise only the ranges are collected.
    """

    def __init__(
        self,
        directory: Path,
        row_options: RowOptions,
        files: Sequence[InputFile],
        is_writing: bool,
    ) -> None:
        self.rows = 0
        self.not_compared = 0
        self.ranges: list[RowRange] = []
        self._row_options = row_options
        self._sources = {file.path: file.source for file in files}
        self._numbers = {file.path: number for number, file in enumerate(files)}
        self._rows_before = 0
        self._paths_before = 0
        names = ["places"]
        if row_options.keep_top is not None:
            names.append("scores")
        if row_options.drops_near:
            bands = range(row_options.near_bands)
            names += ["digests", *(f"keys.{band}" for band in bands)]
        self._files = {name: (directory / name).open("wb") for name in names} if is_writing else {}

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add_dataset(self, earlier: EarlierDataset) -> None:
        """Add the rows of an earlier dataset."""
        import numpy as np

        sources = np.array([_hash_source(source) for _, source in earlier.paths], np.uint64)
        for split in earlier.splits:
            first = self.rows
            for earlier_range in earlier.list_ranges(split):
                self.ranges.append(
                    RowRange(self.rows, earlier_range.count, earlier_range.path, earlier_range)
                )
                self.rows += earlier_range.count
            if not self._files:
                continue
            keys = earlier.open(split, "keys", self._row_options.near_bands)
            digests = earlier.open(split, "digests", 2)
            places = earlier.open(split, "places", 2)
            for start, own_places in places.blocks():
                rows = slice(start, start + len(own_places))
                source = sources[own_places[:, 0].astype(np.int64)]
                own_places[:, 0] += np.uint64(self._paths_before)
                self._write_places(own_places)
                self._write_signatures(keys.values[rows], digests.values[rows], source)
                if "scores" in self._files:  # rows of an earlier dataset are not selected by score
                    self._files["scores"].write(bytes(4 * len(own_places)))
                keys.release()
            assert self.rows - first == len(places)
        self._paths_before += len(earlier.paths)

    def add(self, result: UnitResult) -> None:
        """Add the rows of the next unit."""
        import numpy as np

        unit = result.unit
        if unit.begins:
            self._rows_before = 0
        for split in self._row_options.splits:
            rows = result.rows[split]
            if not rows:
                continue
            part = unit.part(split)
            self.ranges.append(RowRange(self.rows, rows, part, digest=result.digests[part.name]))
            self.rows += rows
            if not self._files:
                continue
            paths = [span.file.path for span in unit.spans]
            counts = np.diff(result.rows_of[split], prepend=0)
            positions = read_sidecar(unit.part(f"{split}.positions"), rows, np.uint64)
            positions += np.uint64(self._rows_before)
            numbers = np.array(
                [self._numbers[path] + self._paths_before for path in paths], np.uint64
            )
            self._write_places(np.column_stack([np.repeat(numbers, counts), positions[:, 0]]))
            if "scores" in self._files:
                scores = read_sidecar(unit.part(f"{split}.scores"), rows, np.float32)
                self._files["scores"].write(scores.tobytes())
            if self._row_options.drops_near:
                sources = np.array([_hash_source(self._sources[path]) for path in paths], np.uint64)
                self._write_signatures(
                    read_sidecar(unit.part(f"{split}.keys"), rows, np.uint64),
                    read_sidecar(unit.part(f"{split}.digests"), rows, np.uint64),
                    np.repeat(sources, counts),
                )
        self._rows_before += result.rows_of_part

    def _write_places(self, places: np.ndarray) -> None:
        """Write the number of the file and the position in it of some rows."""
        import numpy as np

        self._files["places"].write(np.ascontiguousarray(places).tobytes())

    def _write_signatures(self, keys: np.ndarray, digests: np.ndarray, sources: np.ndarray) -> None:
        """Write the keys and digests of some rows. sources: the hash of each row's source."""
        import numpy as np

        has_key = keys[:, 0] != minhash.NO_KEY
        self.not_compared += int((~has_key).sum())
        if self._row_options.near_within == SOURCE:  # rows of different sources must share no key
            keys = words.mix_bits(keys ^ sources[:, None])
            digests = digests.copy()
            digests[:, 0] ^= sources
        keys = np.where(has_key[:, None], np.maximum(keys, np.uint64(1)), np.uint64(minhash.NO_KEY))
        self._files["digests"].write(np.maximum(digests, np.uint64(1)).tobytes())
        for band, column in enumerate(keys.T):
            self._files[f"keys.{band}"].write(np.ascontiguousarray(column).tobytes())


def _hash_source(path: str) -> int:
    source = find_source(path)
    digest = hashlib.blake2b(source.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
