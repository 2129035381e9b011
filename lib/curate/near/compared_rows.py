"""Number the rows that a search compares: those of earlier datasets, then those of this one.

The arrays of a search lie in files of one directory, with one entry per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core.data_names import find_source
from lib.curate.disk_array import DiskArray
from lib.curate.near.minhash import NO_KEY
from lib.curate.near.signatures import EarlierDataset
from lib.curate.row_texts import list_sources
from lib.curate.words import mix_bits
from lib.tokens import columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from lib.curate.reader import SourceDataset

DIGESTS = "digests"  # uint64 [documents, 2]
LEADERS = "leaders"  # int64: 1 + the kept document that a document duplicates, 0: it is kept
OMITTED = "omitted"  # uint8: not 0 for a row that an earlier step or rule has dropped
SIMILARITIES = "similarities"  # float32, to the leader
SIZES = "sizes"  # int64: rows of the cluster of a kept document besides itself


@dataclass(frozen=True)
class DocumentRange:
    """Describes consecutive documents in one shard.

    first, count: numbers of the documents. shard: the file. batch, batches: the record batches of
    the shard that contain them; None for all. rows: the row of each document after the first of
    these batches (int64), None if each row is a document. is_earlier: it belongs to an earlier
    dataset.
    """

    first: int
    count: int
    shard: Path
    batch: int
    batches: int | None
    rows: np.ndarray | None
    is_earlier: bool

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches."""
        stop = None if self.batches is None else self.batch + self.batches
        yield from islice(columns.read_batches([self.shard], mapped=True), self.batch, stop)

    def find_rows(self, documents: np.ndarray) -> np.ndarray:
        """Return the row of some documents after the first batch of the range (int64)."""
        numbers = documents - self.first
        return numbers if self.rows is None else self.rows[numbers]


class ComparedRows:
    """The documents of a search.

    directory: with the arrays. earlier: datasets whose rows come first.
    """

    def __init__(
        self, directory: Path, source: SourceDataset, earlier: Sequence[EarlierDataset]
    ) -> None:
        self.directory = directory
        self.earlier = earlier
        self._source = source
        self.first_new = sum(dataset.count_rows() for dataset in earlier)
        self.count = self.first_new + source.rows

    def open(self, name: str, dtype: object, width: int = 0) -> DiskArray:
        """Return an array."""
        return DiskArray(self.directory / name, dtype, width=width)

    def create(self, name: str, dtype: object) -> DiskArray:
        """Return a new array of zeros."""
        return DiskArray(self.directory / name, dtype, (self.count,))

    def join_sources(self, own_values: DiskArray) -> DiskArray:
        """Write the hash of the source of each document, and return them (uint64).

        own_values: of this dataset.
        """
        import numpy as np

        with (self.directory / "sources").open("wb") as file:
            for dataset in self.earlier:
                for split in dataset.splits:
                    for shard, rows in dataset.list_shards(split):
                        file.write(_hash_sources(shard)[rows].tobytes())
            for _, values in own_values.blocks():
                file.write(values.tobytes())
        return self.open("sources", np.uint64)

    def join_digests(self, own_values: DiskArray, mixer: DiskArray | None) -> DiskArray:
        """Write the digests of the earlier datasets and of this one, and return them.

        own_values: uint64 [rows, 2]. mixer: uint64 [documents], which makes the digests of
        documents of different sources differ; None to compare all documents.
        """
        import numpy as np

        with (self.directory / DIGESTS).open("wb") as file:
            for first, values in self._list_blocks("digests", 2, own_values):
                file.write(_mix_sources(values, first, mixer).tobytes())
        return self.open(DIGESTS, np.uint64, 2)

    def join_keys(
        self, bands: int, open_own: Callable[[str], DiskArray], mixer: DiskArray | None
    ) -> int:
        """Write the keys of all documents, and return how many documents have none.

        open_own: returns the array `keys.NUMBER` of this dataset (uint64 [rows]). mixer: see
        `join_digests`. The files have the same names.
        """
        import numpy as np

        names = [f"keys.{band}" for band in range(bands)]
        missing = 0
        with ExitStack() as stack:
            files = [stack.enter_context((self.directory / name).open("wb")) for name in names]
            for first, values in self._list_blocks("keys", bands):
                missing += int((values[:, 0] == NO_KEY).sum())
                for band, file in enumerate(files):
                    file.write(
                        _mix_sources(np.ascontiguousarray(values[:, band]), first, mixer).tobytes()
                    )
        for name in names:  # one after the other, since each open array and file counts
            with (self.directory / name).open("ab") as file:
                for start, values in open_own(name).blocks():
                    missing += int((values == NO_KEY).sum()) if name == names[0] else 0
                    file.write(_mix_sources(values, self.first_new + start, mixer).tobytes())
        return missing

    def _list_blocks(
        self, name: str, width: int, own_values: DiskArray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of an array of the earlier datasets, and of this one if it is given.

        Each comes with the number of its first document.
        """
        arrays = [
            dataset.open(split, name, width) for dataset in self.earlier for split in dataset.splits
        ]
        first = 0
        for array in (*arrays, *([own_values] if own_values else [])):
            for start, values in array.blocks():
                yield first + start, values
            first += len(array)

    def list_ranges(self) -> Iterator[DocumentRange]:
        """Yield all documents in order, shard by shard or unit by unit."""
        first = 0
        for dataset in self.earlier:
            for split in dataset.splits:
                for shard, rows in dataset.list_shards(split):
                    yield DocumentRange(first, len(rows), shard, 0, None, rows, True)
                    first += len(rows)
        for unit in self._source.units:
            yield DocumentRange(first, unit.rows, unit.shard, unit.batch, unit.batches, None, False)
            first += unit.rows


def _hash_sources(shard: Path) -> np.ndarray:
    """Return the hash of the source of each row of a shard (uint64)."""
    import numpy as np

    hashes = [
        hash_source(source)
        for batch in columns.read_batches([shard], mapped=True)
        for source in list_sources(batch)
    ]
    return np.array(hashes, np.uint64)


def hash_source(source: str) -> int:
    """Return a hash of the top-level directory of a row's source."""
    name = find_source(source).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _mix_sources(values: np.ndarray, first: int, mixer: DiskArray | None) -> np.ndarray:
    """Return values of which only those of the same source can be equal; NO_KEY stays as it is.

    values: uint64 [n] or [n, columns] of the documents from number `first` on.
    """
    import numpy as np

    if mixer is None:
        return values
    sources = mixer.values[first : first + len(values)]
    mixed = values.copy()
    column = mixed if mixed.ndim == 1 else mixed[:, 0]
    is_used = column != NO_KEY
    column[is_used] = np.maximum(mix_bits(column[is_used] ^ sources[is_used]), np.uint64(1))
    mixer.release()
    return mixed
