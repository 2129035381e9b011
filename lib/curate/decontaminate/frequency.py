"""Find the n-grams of test questions that are frequent in a dataset, from a sample of its rows.

A question may contain a licence text, a formula of politeness or other words that many documents
contain. Those n-grams say nothing about the question, and are ignored. Copies of the question
itself are contamination, however many there are, so n-grams in a copy do not make themselves
frequent: only documents count that contain an n-gram without the rest of its question. But a text
in a fifth of all documents is no test question that has leaked; its n-grams are always ignored.

The n-grams must be known before the first row is compared. A further pass over all rows would
double the time, so a sample decides. It depends on the dataset alone: the first rows of at most 64
units, which are spread evenly over the dataset. Each unit contributes an equal share of 64 million
characters, or less if it is smaller. Equal texts count once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from lib.core import hashing
from lib.core.progress import Progress
from lib.core.units import ceil_div
from lib.curate.decontaminate import matching
from lib.curate.decontaminate.index import Frequent, Index
from lib.curate.reader import SourceDataset, Unit
from lib.curate.rows import RowBatch

if TYPE_CHECKING:
    import numpy as np

FREQUENT = 0.001  # share of the rows from which an n-gram outside of copies is frequent
MOST = 0.2  # share of the rows from which an n-gram is frequent wherever it is
# An n-gram in at most this many rows is never frequent, or copies in a tiny dataset would be.
FEWEST_ROWS = 10
COPY = 0.75  # a row with this share of the n-grams of a question is a copy of it
MOST_UNITS = 64
MOST_CHARACTERS = 1 << 26  # characters of the sample, for all units together


class CorpusSample(NamedTuple):
    """Contains which n-grams of an index are frequent, and which questions occur in the sample.

    is_frequent: bool [n-grams]. together: int64 [questions], number of sampled rows that contain
    the question.
    """

    is_frequent: np.ndarray
    together: np.ndarray
    frequent: Frequent


def sample_rows(
    source: SourceDataset, test_index: Index, least: float, progress: bool
) -> CorpusSample:
    """Return which n-grams of an index are frequent in a dataset.

    least: the share of the n-grams of a question with which a row contains the question.
    """
    units = source.units[:: max(1, ceil_div(len(source.units), MOST_UNITS))]
    counter = _Counter(test_index, least)
    with Progress("sample", len(units), "unit", progress) as bar:
        for unit in units:
            _read_beginning(unit, MOST_CHARACTERS // len(units), counter)
            bar.advance()
    return counter.finish()


def _read_beginning(unit: Unit, characters: int, counter: _Counter) -> None:
    """Count the first rows of a unit, until they have this many characters."""
    for batch in unit.read_rows():
        last = 0
        while last < len(batch.rows) and characters > 0:
            characters -= len(batch.texts[last])
            last += 1
        counter.add(RowBatch(batch.rows[:last], {}))
        if characters <= 0:
            return


class _Counter:
    """Counts in how many rows each n-gram of an index occurs: in all, and outside of copies."""

    def __init__(self, test_index: Index, least: float) -> None:
        import numpy as np

        self._index = test_index
        self._least = least
        self._seen: set[bytes] = set()  # digests of texts
        self._counts = np.zeros(len(test_index.hashes), np.int64)
        self._outside = np.zeros(len(test_index.hashes), np.int64)
        self._together = np.zeros(len(test_index.sizes), np.int64)

    def add(self, batch: RowBatch) -> None:
        """Count the n-grams of the rows whose text is new."""
        import numpy as np

        rows = []
        for row in batch.rows:
            text = matching.get_text(row).encode("utf-8", "surrogatepass")
            digest = hashlib.sha256(text).digest()[:16]
            if digest not in self._seen:
                self._seen.add(digest)
                rows.append(row)
        grams = matching.hash_batch(RowBatch(rows, {}))
        matches = matching.find_matches(self._index, grams)
        overlaps = matching.find_overlaps(self._index, matches)
        is_in_copy = np.zeros(len(matches.rows), bool)
        is_in_copy[matches.owners[(overlaps.shares >= COPY)[overlaps.of_pair]]] = True
        np.add.at(self._counts, matches.members, 1)
        np.add.at(self._outside, matches.members[~is_in_copy], 1)
        np.add.at(self._together, overlaps.questions[overlaps.shares >= self._least], 1)

    def finish(self) -> CorpusSample:
        """Return which n-grams are frequent."""
        rows = len(self._seen)
        least = max(FEWEST_ROWS, int(FREQUENT * rows))
        most = max(FEWEST_ROWS, int(MOST * rows))
        is_frequent = (self._outside > least) | (self._counts > most)
        ignored = self._index.hashes[is_frequent]
        digest = hashing.fingerprint(ignored.tolist())
        frequent = Frequent(rows, least, most, len(ignored), digest)
        return CorpusSample(is_frequent, self._together, frequent)
