"""Compare rows with the questions of test sets, and count which questions occur in them."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.curate import shingles
from lib.curate.decontaminate import index
from lib.curate.decontaminate.hits import SAMPLES, HitSample, SetHits, TestHits
from lib.curate.decontaminate.index import Index
from lib.curate.rows import Row, RowBatch
from lib.curate.shingles import Shingles
from lib.curate.words import WORDS, find_words

if TYPE_CHECKING:
    import numpy as np

_DIGITS = 2  # decimals of a share in texts


class Matches(NamedTuple):
    """Contains the n-grams of questions that rows contain, each n-gram of a row once.

    rows, members, positions: [n-grams], the row, the number of the n-gram in the index, and where
    it is first among the n-grams of all rows. owners, questions: [pairs], the number of an n-gram
    in these arrays, and a question that contains it.
    """

    rows: np.ndarray
    members: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    questions: np.ndarray


class Overlaps(NamedTuple):
    """Contains the pairs of a row and a question with common n-grams, sorted by both.

    rows, questions: [overlaps]. shares: [overlaps], the part of the question's n-grams that the row
    contains. first: [overlaps], a pair of Matches with the first of these n-grams. of_pair: [pairs]
    of Matches, the overlap that each of them belongs to.
    """

    rows: np.ndarray
    questions: np.ndarray
    shares: np.ndarray
    first: np.ndarray
    of_pair: np.ndarray


class Hits(NamedTuple):
    """Contains the pairs of a row and a question with a sufficient share, sorted by both.

    All arrays are [pairs]. rows: number of the row in the batch. questions: number of the question
    in the index. shares: see Overlaps. positions: the place of the first common n-gram among the
    n-grams of the row.
    """

    rows: np.ndarray
    questions: np.ndarray
    shares: np.ndarray
    positions: np.ndarray


def find_matches(test_index: Index, grams: Shingles) -> Matches:
    """Return which n-grams of questions the rows contain. grams: the n-grams of the rows."""
    import numpy as np

    positions, members = index.find_members(test_index, grams.hashes)
    rows = np.searchsorted(grams.ends, positions, "right")
    _, first = np.unique(rows * len(test_index.hashes) + members, return_index=True)
    first.sort()
    members = members[first]
    stops = test_index.ends[members]
    counts = stops - np.where(members > 0, test_index.ends[members - 1], 0)
    total = np.cumsum(counts)
    offsets = np.arange(int(total[-1]) if len(total) else 0) - np.repeat(total - counts, counts)
    questions = test_index.postings[np.repeat(stops - counts, counts) + offsets]
    owners = np.repeat(np.arange(len(members)), counts)
    return Matches(rows[first], members, positions[first], owners, questions)


def find_overlaps(test_index: Index, matches: Matches) -> Overlaps:
    """Return which part of which question each row contains."""
    import numpy as np

    questions = max(1, len(test_index.sizes))
    pairs = matches.rows[matches.owners] * questions + matches.questions
    distinct, first, of_pair, counts = np.unique(
        pairs, return_index=True, return_inverse=True, return_counts=True
    )
    question = distinct % questions
    shares = counts / test_index.sizes[question]
    return Overlaps(distinct // questions, question, shares, first, of_pair)


def find_hits(test_index: Index, grams: Shingles, least: float) -> Hits:
    """Return which questions occur in rows.

    grams: the n-grams of the rows. least: the smallest share of a question's n-grams that a row
    must contain to be a hit.
    """
    import numpy as np

    matches = find_matches(test_index, grams)
    overlaps = find_overlaps(test_index, matches)
    is_hit = overlaps.shares >= least
    rows = overlaps.rows[is_hit]
    positions = matches.positions[matches.owners[overlaps.first[is_hit]]]
    before = np.where(rows > 0, grams.ends[rows - 1], 0)
    return Hits(rows, overlaps.questions[is_hit], overlaps.shares[is_hit], positions - before)


class Comparison:
    """Finds test questions in batches of rows, and counts them. least: see find_hits."""

    def __init__(self, test_index: Index, least: float) -> None:
        self.hits = TestHits()
        self._index = test_index
        self._least = least

    def compare(self, batch: RowBatch) -> tuple[np.ndarray, list[str | None]]:
        """Return which rows contain a question (bool [rows]), and a text about each best hit."""
        import numpy as np

        batch_hits = find_hits(self._index, hash_batch(batch), self._least)
        is_hit = np.zeros(len(batch.rows), bool)
        is_hit[batch_hits.rows] = True
        return is_hit, _note_hits(batch, self._index, batch_hits, self.hits)


@cache
def open_cached(directory: Path) -> Index:
    """Return the index in a directory; each process opens it only once."""
    return index.open_index(directory)


def hash_batch(batch: RowBatch) -> Shingles:
    """Return the n-grams of rows; for a conversation, the n-grams of the user's turns."""
    if any(row.questions for row in batch.rows):
        return shingles.hash_texts([*map(get_text, batch.rows)], index.WORDS)
    words = batch.memo(WORDS, lambda rows: find_words(rows.texts))
    return shingles.join_words(words, index.WORDS)


def _note_hits(
    batch: RowBatch, test_index: Index, batch_hits: Hits, hits: TestHits
) -> list[str | None]:
    """Add the hits of a batch to `hits`; return a text about the best hit of each row, or None."""
    values: list[str | None] = [None] * len(batch.rows)
    best = [0.0] * len(batch.rows)
    seen: set[tuple[int, str]] = set()
    hits.compared += len(batch.rows)
    hits.beginnings += sum(not row.is_whole for row in batch.rows)
    for row, question, share, position in zip(
        *(column.tolist() for column in batch_hits), strict=True
    ):
        test_set = test_index.test_sets[test_index.sets[question]]
        number = int(test_index.numbers[question])
        set_hits = hits.sets.setdefault(test_set.name, SetHits())
        set_hits.questions[number] += 1
        hits.documents += values[row] is None
        set_hits.documents += (row, test_set.name) not in seen
        seen.add((row, test_set.name))
        if share > best[row]:
            best[row] = share
            values[row] = f"{test_set.name} question {number} ({share:.{_DIGITS}f})"
        if len(set_hits.samples) < SAMPLES:
            text = quote_gram(get_text(batch.rows[row]), position)
            place = batch.split, batch.rows[row].number, batch.rows[row].source
            set_hits.samples.append(HitSample(*place, number, round(share, _DIGITS), text))
    return values


def get_text(row: Row) -> str:
    """Return the compared text of a row; for a conversation, the turns of the user."""
    return "\n".join(row.questions) if row.questions else row.text


def quote_gram(text: str, position: int) -> str:
    """Return an n-gram of a text in its compared form. position: number of its first word."""
    normal = text if text.isascii() else unicodedata.normalize("NFC", text)
    (group,) = find_words([text])
    starts = group.words.starts
    end = int(group.words.ends[min(position + index.WORDS, len(starts)) - 1])
    return " ".join(normal.lower()[int(starts[position]) : end].split())
