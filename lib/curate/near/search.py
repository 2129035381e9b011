"""Find the rows that duplicate a kept row, exactly or nearly.

1. Drop rows whose content equals that of an earlier row.
2. Sort the keys of each band, to find the rows that share one (key_groups.py).
3. Compute the sets of shingles of these rows (shingle_sets.py).
4. Walk the rows in order and find the leader of each near duplicate (leaders.py).

All work lies on disk, and a part that was finished before a kill is not repeated.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import log, units, workers
from lib.core.progress import Progress
from lib.curate.disk_array import DiskArray
from lib.curate.near import key_groups, shingle_sets
from lib.curate.near.compared_rows import (
    DIGESTS,
    LEADERS,
    OMITTED,
    SIMILARITIES,
    SIZES,
    ComparedRows,
)
from lib.curate.near.leaders import Limits, SetStore, Walk
from lib.curate.near.minhash import Bands
from lib.curate.near.recall import RecallSample
from lib.curate.near.shingle_sets import SetsTask

if TYPE_CHECKING:
    import numpy as np

    from lib.curate.whole import ChangingStep

# Values of OMITTED: for duplicates, and for a row that is dropped already.
COPY = 1
NEAR = 2
DROPPED = 3
WALK = "walk"
_DOCUMENTS_AT_ONCE = 1 << 13  # documents with a shared key in one step of the walk
_LARGEST = 10  # clusters that are reported


@dataclass(frozen=True)
class NearSettings:
    """Contains the settings of a search for near duplicates.

    words: in a shingle. threshold, candidates, members: see leaders.Limits. changing: see
    shingle_sets.SetsWriter.
    """

    bands: Bands
    words: int
    threshold: float
    candidates: int
    members: int
    changing: Sequence[ChangingStep] = ()


class Search:
    """Searches the documents of a directory.

    documents: with the arrays DIGESTS, OMITTED, LEADERS, SIMILARITIES and SIZES, and `keys.NUMBER`
    for near duplicates. count: number of worker processes, which `context` starts. recall, note:
    read and write what is finished, by name.
    """

    def __init__(
        self,
        documents: ComparedRows,
        count: int,
        context: Callable[[], BaseContext],
        recall: Callable[[str], Any],
        note: Callable[[str, Any], None],
        progress: bool,
    ) -> None:
        self._documents = documents
        self._directory = documents.directory
        self._first_new = documents.first_new
        self._workers = count
        self._context = context
        self._recall = recall
        self._note = note
        self._progress = progress

    def find_copies(self) -> int:
        """Drop rows whose content equals the content of an earlier row; return their number."""
        import numpy as np

        path = self._directory / "copies"
        omitted = self._documents.open(OMITTED, np.uint8)
        count = key_groups.write_groups(
            self._documents.open(DIGESTS, np.uint64, 2), omitted, self._first_new, path
        )
        firsts = DiskArray(self._directory / "firsts", np.int64, (count,))
        leaders = self._documents.open(LEADERS, np.int64)
        similarities = self._documents.open(SIMILARITIES, np.float32)
        copies = 0
        for _, pairs in DiskArray(path, np.uint64, width=2).blocks():
            documents = pairs[:, 0].astype(np.int64)
            groups = pairs[:, 1].astype(np.int64)
            opened, index = np.unique(groups, return_index=True)
            is_new = firsts.values[opened] == 0
            firsts.values[opened[is_new]] = documents[index[is_new]] + 1
            first = firsts.values[groups]
            is_copy = (first != documents + 1) & (documents >= self._first_new)
            leaders.values[documents[is_copy]] = first[is_copy]
            similarities.values[documents[is_copy]] = 1.0
            omitted.values[documents[is_copy]] = COPY
            copies += int(is_copy.sum())
        self._delete("copies", "firsts")
        return copies

    def ignore_repeats(self, weights: DiskArray) -> None:
        """Let the copies of a row that an earlier --near-keep upsample has written count as none.

        These are the equal rows directly behind a row. weights: see `measure_clusters`; changed.
        Call this after `find_copies`; a second call changes nothing.
        """
        import numpy as np

        leaders = self._documents.open(LEADERS, np.int64)
        last = 0
        for first, block in weights.blocks():
            start = self._first_new + first
            row_leaders = leaders.values[start : start + len(block)].copy()
            documents_before = np.arange(start, start + len(block))  # counted from 1, as leaders
            follows_leader = row_leaders == documents_before
            is_repeat = follows_leader | (row_leaders == np.concatenate([[last], row_leaders[:-1]]))
            is_repeat &= (row_leaders != 0) & (block > 1)
            weights.values[first : first + len(block)][is_repeat] = 0
            last = int(row_leaders[-1])
            for array in (leaders, weights):
                array.release()

    def find_near(self, settings: NearSettings) -> dict[str, Any]:
        """Drop near duplicates; return counts for the report."""
        found: dict[str, Any] | None = self._recall(WALK)
        if found is None:
            pairs = self._group(settings.bands.number)
            self._compute_sets(settings)
            found = self._walk(settings, sum(pairs))
            self._note(WALK, found)
        self._delete("remembered", "counts", "sets", "ends", "candidates", DIGESTS)
        for band in range(settings.bands.number):
            self._delete(f"members.{band}", f"keys.{band}")
        return found

    def _group(self, bands: int) -> list[int]:
        """Write to a file for each band which rows share a key; return the number of pairs."""
        pairs: list[int] | None = self._recall("pairs")
        if pairs is None:
            tasks = [(self._directory, band, self._first_new) for band in range(bands)]
            with workers.Pool(
                min(self._workers, bands), "bands", _prepare_grouping, context=self._context()
            ) as pool:
                pairs = list(pool.run(tasks))
            self._note("pairs", pairs)
        return pairs

    def _open_members(self, bands: int) -> list[DiskArray]:
        import numpy as np

        return [self._documents.open(f"members.{band}", np.uint64, 2) for band in range(bands)]

    def _compute_sets(self, settings: NearSettings) -> None:
        """Compute the sets of the rows that share a key, in the order of the rows."""
        import numpy as np

        if self._recall("sets") is not None:
            return
        total = 0
        computed = 0
        outputs: deque[Path] = deque()
        with (
            workers.Pool(
                self._workers,
                "sets",
                shingle_sets.prepare_worker,
                settings.words,
                settings.changing,
                context=self._context(),
            ) as pool,
            (self._directory / "candidates").open("wb") as candidates,
            (self._directory / "ends").open("wb") as ends,
            (self._directory / "sets").open("wb") as sets,
            Progress("compare", None, "part", self._progress) as bar,
        ):
            tasks = self._list_tasks(settings.bands.number, candidates, outputs)
            for sizes in pool.run(tasks):
                path = outputs.popleft()
                ends.write((np.cumsum(sizes) + total).tobytes())
                total += int(sizes.sum())
                computed += len(sizes)
                with path.open("rb") as part:
                    shutil.copyfileobj(part, sets, 1 << 20)
                path.unlink()
                bar.advance()
        log.info(
            f"near duplicates: {units.counted(computed, 'row')} may be similar to another row "
            f"({units.size(8 * total)} of n-grams on disk)"
        )
        self._note("sets", total)

    def _list_tasks(
        self, bands: int, candidates: BinaryIO, outputs: deque[Path]
    ) -> Iterator[SetsTask]:
        """Yield the tasks for the rows that share a key.

        candidates: file for the numbers of these rows. outputs: receives the file of each task.
        """
        members = self._open_members(bands)
        for number, row_range in enumerate(self._documents.list_ranges()):
            documents = _list_documents(members, row_range.first, row_range.first + row_range.count)
            if len(documents):
                candidates.write(documents.tobytes())
                outputs.append(self._directory / f"sets.{number}")
                yield SetsTask(row_range, row_range.find_rows(documents), outputs[-1])

    def _walk(self, settings: NearSettings, pairs: int) -> dict[str, Any]:
        """Find the leader of each near duplicate, and the size of each cluster."""
        import numpy as np

        remembered = DiskArray(self._directory / "remembered", np.int64, (pairs,))
        counts = DiskArray(self._directory / "counts", np.int32, (pairs,))
        candidates = self._documents.open("candidates", np.int64)
        arrays = [
            self._documents.open(LEADERS, np.int64),
            self._documents.open(OMITTED, np.uint8),
            self._documents.open(SIMILARITIES, np.float32),
        ]
        leaders, omitted, similarities = (array.values for array in arrays)
        limits = Limits(settings.threshold, settings.candidates, settings.members, self._first_new)
        with (
            (self._directory / "sets").open("rb") as file,
            Progress("near", len(candidates), "row", self._progress) as bar,
        ):
            store = SetStore(
                file,
                self._documents.open("candidates", np.int64),
                self._documents.open("ends", np.int64),
            )
            sample = RecallSample(settings.bands, len(candidates), settings.threshold)
            members = self._open_members(settings.bands.number)
            walk = Walk(members, remembered, counts, store, limits, sample)
            for first in range(0, len(candidates), _DOCUMENTS_AT_ONCE):
                documents = candidates.values[first : first + _DOCUMENTS_AT_ONCE].copy()
                for document, groups in walk.list_steps(int(documents[0]), int(documents[-1]) + 1):
                    if found := walk.find_leader(document, groups):
                        leaders[document] = found[0] + 1
                        similarities[document] = found[1]
                        omitted[document] = NEAR
                bar.advance(len(documents))
                walk.release()
                for array in arrays:
                    array.release()
        return {**asdict(walk.counts), "recall": sample.counts}

    def measure_clusters(self, weights: DiskArray) -> list[list[int]]:
        """Count the rows of each cluster; return the largest as `[size, document]`.

        An exact copy of a dropped row gets the leader and the similarity of that row. weights:
        int64 [rows], the rows that each row of this dataset stands for since an earlier search.
        """
        import numpy as np

        leaders = self._documents.open(LEADERS, np.int64)
        omitted = self._documents.open(OMITTED, np.uint8)
        similarities = self._documents.open(SIMILARITIES, np.float32)
        sizes = self._documents.create(SIZES, np.int64)
        for first, block in weights.blocks():
            rows = slice(self._first_new + first, self._first_new + first + len(block))
            sizes.values[rows] = np.where(omitted.values[rows] == 0, block - 1, 0)
        for first, block in leaders.blocks():
            dropped = np.flatnonzero(block)
            direct = block[dropped] - 1
            last = leaders.values[direct]
            is_moved = last != 0
            moved = dropped[is_moved] + first
            leaders.values[moved] = last[is_moved]
            similarities.values[moved] = similarities.values[direct[is_moved]]
            omitted.values[moved] = NEAR
            lost = weights.values[dropped + first - self._first_new]
            final, place = np.unique(np.where(is_moved, last - 1, direct), return_inverse=True)
            sizes.values[final] += np.bincount(place, lost).astype(np.int64)
            for array in (leaders, omitted, similarities, sizes, weights):
                array.release()
        largest: list[tuple[int, int]] = []
        for first, block in sizes.blocks():
            order = np.argsort(-block, kind="stable")[:_LARGEST]
            largest += [(int(block[i]) + 1, int(i) + first) for i in order if block[i]]
            largest = sorted(largest, key=lambda cluster: (-cluster[0], cluster[1]))[:_LARGEST]
        return [[size, document] for size, document in largest]

    def _delete(self, *names: str) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)


def _prepare_grouping() -> Callable[[tuple[Path, int, int]], int]:
    return _group_band


def _group_band(task: tuple[Path, int, int]) -> int:
    """Write which rows share a key of one band; returns the number of pairs."""
    import numpy as np

    directory, band, first_new = task
    return key_groups.write_groups(
        DiskArray(directory / f"keys.{band}", np.uint64),
        DiskArray(directory / OMITTED, np.uint8),
        first_new,
        directory / f"members.{band}",
    )


def _list_documents(members: Sequence[DiskArray], first: int, last: int) -> np.ndarray:
    """Return the documents in [first, last) that share a key of some band (int64, increasing)."""
    import numpy as np

    pieces = []
    for band in members:
        documents = band.values[:, 0]
        begin, end = np.searchsorted(documents, np.array([first, last], np.uint64))
        pieces.append(documents[begin:end].astype(np.int64))
        band.release()
    return np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.int64)
