"""Decide which documents are near duplicates: walk them in order, and keep the leaders.

A document is compared with the earlier kept documents (leaders) that share a band key with it. The
leaders with the most shared keys come first, and among equals the earliest. The document is dropped
at the first leader whose exact Jaccard similarity reaches the threshold. So a dropped document is
always similar to a kept one, and not only to another dropped one.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING

from lib.curate.disk_array import DiskArray
from lib.curate.near.recall import RecallSample

if TYPE_CHECKING:
    import numpy as np

_CACHED_BYTES = 32_000_000
# The sample for the recall contains so many leaders of a document, and up to almost twice as many.
_SAMPLED_LEADERS = 16


@dataclass
class WalkCounts:
    """Counts the documents and comparisons of a walk.

    documents: number of documents that share a key with another one. compared: number of pairs
    whose exact similarity was computed. candidates_reached: number of documents with more leaders
    than the limit for comparisons. members_reached: how often a kept document could not become a
    leader of a key, because the key had its largest number of leaders.
    """

    documents: int = 0
    compared: int = 0
    candidates_reached: int = 0
    members_reached: int = 0


@dataclass(frozen=True)
class Limits:
    """Contains the settings of a walk.

    threshold: Jaccard similarity from which a document is dropped. candidates: the most leaders
    that a document is compared with. members: the most leaders of a key. first_new: number of the
    first new document; earlier documents belong to other datasets and become leaders without a
    comparison.
    """

    threshold: float
    candidates: int
    members: int
    first_new: int = 0


class SetStore:
    """Reads sets of shingles from a file, with the recently used ones in memory.

    documents: the documents with a set, increasing. ends: the end of each set, in hashes.
    """

    def __init__(self, file: BufferedReader, documents: DiskArray, ends: DiskArray) -> None:
        self._file = file
        self._documents = documents
        self._ends = ends
        self._cached: OrderedDict[int, np.ndarray] = OrderedDict()
        self._bytes = 0

    def read(self, document: int) -> np.ndarray:
        """Return the set of a document: its distinct hashes, sorted (uint64)."""
        import numpy as np

        if document in self._cached:
            self._cached.move_to_end(document)
            return self._cached[document]
        index = int(np.searchsorted(self._documents.values, document))
        start = int(self._ends.values[index - 1]) if index else 0
        size = int(self._ends.values[index]) - start
        data = os.pread(self._file.fileno(), 8 * size, 8 * start)
        hashes = np.frombuffer(data, np.uint64)
        self._cached[document] = hashes
        self._bytes += hashes.nbytes
        while self._bytes > _CACHED_BYTES and len(self._cached) > 1:
            self._bytes -= self._cached.popitem(last=False)[1].nbytes
        return hashes

    def release(self) -> None:
        """Remove the index from memory."""
        self._documents.release()
        self._ends.release()


class Walk:
    """Walks documents in order and finds the leader of each near duplicate.

    members: by band, the pairs `(document, group)` of key_groups.py. remembered: int64, one entry
    per pair of all bands; the leaders of a group are stored from its index on. counts: int32, the
    number of leaders of the group with this index. sample: receives pairs, to estimate the recall.
    """

    def __init__(
        self,
        members: Sequence[DiskArray],
        remembered: DiskArray,
        counts: DiskArray,
        sets: SetStore,
        limits: Limits,
        sample: RecallSample | None = None,
    ) -> None:
        self.counts = WalkCounts()
        self.sample = sample
        self._members = members
        self._remembered = remembered
        self._group_counts = counts
        self._sets = sets
        self._limits = limits

    def find_leader(self, document: int, groups: np.ndarray) -> tuple[int, float] | None:
        """Return the leader of a document and their similarity, None if the document is kept.

        groups: the groups of the document (int64). A kept document becomes a leader of them.
        """
        self.counts.documents += 1
        if document >= self._limits.first_new:
            if self.sample and self.sample.selects(document):
                self._sample_pairs(self.sample, document, groups)
            for leader in self._list_candidates(groups):
                similarity = self._compare(document, leader)
                if similarity >= self._limits.threshold:
                    return leader, similarity
        counts = self._group_counts.values
        present = counts[groups]
        has_room = present < self._limits.members
        self.counts.members_reached += len(groups) - int(has_room.sum())
        joined = groups[has_room]
        self._remembered.values[joined + present[has_room]] = document
        counts[joined] += 1
        return None

    def _list_shared(self, groups: np.ndarray) -> np.ndarray:
        """Return the leaders of some groups (int64); a leader of several groups is repeated."""
        import numpy as np

        counts = self._group_counts.values[groups]
        remembered = self._remembered.values
        single = remembered[groups[counts == 1]]
        larger = [
            remembered[start : start + count]
            for start, count in zip(groups[counts > 1], counts[counts > 1], strict=True)
        ]
        return np.concatenate([single, *larger]) if larger else single

    def _list_candidates(self, groups: np.ndarray) -> list[int]:
        import numpy as np

        shared = self._list_shared(groups)
        if len(shared) < 2:
            return shared.tolist()
        leaders, keys = np.unique(shared, return_counts=True)
        if len(leaders) > self._limits.candidates:
            self.counts.candidates_reached += 1
        order = np.argsort(-keys, kind="stable")
        return leaders[order[: self._limits.candidates]].tolist()

    def _sample_pairs(self, sample: RecallSample, document: int, groups: np.ndarray) -> None:
        """Add the pairs of a document to the sample, unless one of its groups is full."""
        import numpy as np

        if (self._group_counts.values[groups] >= self._limits.members).any():
            return
        leaders, keys = np.unique(self._list_shared(groups), return_counts=True)
        # Which of many leaders are sampled must not depend on the number of shared bands.
        step = max(1, len(leaders) // _SAMPLED_LEADERS)
        for leader, shared in zip(leaders[::step].tolist(), keys[::step].tolist(), strict=True):
            sample.add(self._measure(document, leader), shared)

    def _compare(self, document: int, leader: int) -> float:
        """Return the Jaccard similarity of two documents, 0 if their sizes exclude it."""
        sizes = sorted((len(self._sets.read(leader)), len(self._sets.read(document))))
        if sizes[0] / sizes[1] < self._limits.threshold:
            return 0.0
        self.counts.compared += 1
        return self._measure(document, leader)

    def _measure(self, document: int, leader: int) -> float:
        """Return the Jaccard similarity of two documents."""
        import numpy as np

        one = self._sets.read(leader)
        two = self._sets.read(document)
        small, large = (one, two) if len(one) < len(two) else (two, one)
        places = np.searchsorted(large, small)
        places[places == len(large)] = 0
        common = int((large[places] == small).sum())
        return common / (len(one) + len(two) - common)

    def list_steps(self, first: int, last: int) -> list[tuple[int, np.ndarray]]:
        """Return the documents in [first, last) that share keys, in order, with their groups."""
        import numpy as np

        pieces = []
        start = 0
        for band in self._members:
            documents = band.values[:, 0]
            begin, end = np.searchsorted(documents, np.array([first, last], np.uint64))
            piece = band.values[begin:end].astype(np.int64)
            piece[:, 1] += start
            pieces.append(piece)
            start += len(band)
        pairs = np.concatenate(pieces)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        documents, starts = np.unique(pairs[:, 0], return_index=True)
        return list(zip(documents.tolist(), np.split(pairs[:, 1], starts[1:]), strict=True))

    def release(self) -> None:
        """Remove all arrays from memory."""
        for array in (*self._members, self._remembered, self._group_counts):
            array.release()
        self._sets.release()
