"""Find the documents that share a key, by sorting on disk.

If memory cannot hold the keys of all documents, the keys are first distributed to files by their
highest bits, so that equal keys are in the same file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lib.core import units
from lib.curate.disk_array import BLOCK, DiskArray
from lib.curate.near.minhash import NO_KEY

if TYPE_CHECKING:
    import numpy as np

SORTED_AT_ONCE = 1 << 20  # records of 16 or 24 bytes; sorting takes four times their memory
MOST_BUCKETS = 512  # files that are open at once


def write_groups(
    keys: DiskArray, is_omitted: DiskArray | None, first_new: int, out: Path, limit: int = 0
) -> int:
    """Write which documents share a key, and return the number of pairs `(document, group)`.

    keys: uint64 [documents] or [documents, columns]; a document with NO_KEY in the first column is
    in no group. is_omitted: documents with a value other than zero are in no group either.
    first_new: number of the first new document; groups without a new document are omitted. out:
    file for the pairs (uint64), in the order of the documents. The number of a group is followed by
    as many unused numbers as the group has further members. limit: see SORTED_AT_ONCE.
    """
    import numpy as np

    count = min(MOST_BUCKETS, units.ceil_div(max(1, len(keys)), limit or SORTED_AT_ONCE))
    written = 0
    with ExitStack() as stack:
        # Several bands are sorted at once, and only the end of `out` differs between them.
        keyed = _Buckets(Path(f"{out}.keyed."), count, stack)
        for first, block in keys.blocks():
            columns = block.reshape(len(block), -1)
            is_used = columns[:, 0] != NO_KEY
            if is_omitted is not None:
                is_used &= is_omitted.values[first : first + BLOCK] == 0
            numbers = np.flatnonzero(is_used) + first
            records = np.column_stack([columns[is_used], numbers.astype(np.uint64)])
            keyed.add(records, (records[:, 0] >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))
        if is_omitted is not None:
            is_omitted.release()
        ordered = _Buckets(Path(f"{out}.ordered."), count, stack)
        span = np.uint64(units.ceil_div(max(1, len(keys)), count))
        for records in keyed.read():
            pairs = _find_groups(records, first_new)
            pairs[:, 1] += np.uint64(written)
            written += len(pairs)
            ordered.add(pairs, pairs[:, 0] // span)
        with out.open("wb") as file:
            for pairs in ordered.read():
                file.write(pairs[np.argsort(pairs[:, 0])].tobytes())
    return written


def _find_groups(records: np.ndarray, first_new: int) -> np.ndarray:
    """Return the pairs of the groups in some records, uint64 [members, 2].

    records: uint64 [n, columns + 1], the keys and the document, in the order of the documents.
    """
    import numpy as np

    order = (
        np.argsort(records[:, 0], kind="stable")
        if records.shape[1] == 2
        else np.lexsort(records[:, -2::-1].T)
    )
    records = records[order]
    is_first = np.ones(len(records) + 1, bool)
    is_first[1:-1] = (records[1:, :-1] != records[:-1, :-1]).any(axis=1)
    edges = np.flatnonzero(is_first)
    sizes = np.diff(edges)
    documents = records[:, -1]
    is_group = (sizes > 1) & (documents[edges[1:] - 1] >= first_new)
    pairs = np.empty((int(sizes[is_group].sum()), 2), np.uint64)
    pairs[:, 0] = documents[np.repeat(is_group, sizes)]
    starts = np.cumsum(sizes[is_group]) - sizes[is_group]
    pairs[:, 1] = np.repeat(starts, sizes[is_group])
    return pairs


class _Buckets:
    """Distributes records to buckets: to files, or to memory if there is only one bucket."""

    def __init__(self, path: Path, count: int, stack: ExitStack) -> None:
        self._memory: list[np.ndarray] = []
        self._paths = [] if count == 1 else [Path(f"{path}{number}") for number in range(count)]
        self._files: list[BinaryIO] = []
        self._stack = stack
        self._columns = 1

    def add(self, records: np.ndarray, buckets: np.ndarray) -> None:
        """Add records (uint64 [n, columns]). buckets: the bucket of each record."""
        import numpy as np

        self._columns = records.shape[1]
        if not self._paths:
            self._memory.append(records)
            return
        if not self._files:
            self._files = [self._stack.enter_context(path.open("wb")) for path in self._paths]
        order = np.argsort(buckets, kind="stable")
        edges = np.searchsorted(buckets[order], np.arange(len(self._files) + 1))
        for number, file in enumerate(self._files):
            file.write(records[order[edges[number] : edges[number + 1]]].tobytes())

    def read(self) -> Iterator[np.ndarray]:
        """Yield the records of each bucket, and delete the bucket."""
        import numpy as np

        if self._memory:
            yield np.concatenate(self._memory)
        for file in self._files:
            file.close()
        for path in self._paths if self._files else []:
            yield np.fromfile(path, np.uint64).reshape(-1, self._columns)
            path.unlink()
