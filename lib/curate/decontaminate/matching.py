"""Compare rows with the questions of test sets, and count which questions occur in them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.corpus.row_batch import BatchRule, RowBatch, RowText, RowVerdict
from lib.corpus.row_options import RowOptions
from lib.curate import shingles
from lib.curate.decontaminate import index
from lib.curate.decontaminate.hits import SAMPLES, HitSample, SetHits, TestHits
from lib.curate.decontaminate.index import Index
from lib.curate.decontaminate.prepared import PreparedOptions
from lib.curate.shingles import Shingles
from lib.curate.words import WORDS, find_words

if TYPE_CHECKING:
    import numpy as np

    from lib.corpus.tally import Tally

KIND = "test set"
_DIGITS = 2  # decimals of a share in texts


class Hits(NamedTuple):
    """Contains the pairs of a row and a question with a sufficient share, sorted by both.

    All arrays are [pairs]. rows: number of the row in the batch. questions: number of the question
    in the index. shares: the part of the question's n-grams that the row contains. positions: the
    place of the first of these n-grams among the n-grams of the row.
    """

    rows: np.ndarray
    questions: np.ndarray
    shares: np.ndarray
    positions: np.ndarray


def find_hits(test_index: Index, grams: Shingles, least: float) -> Hits:
    """Return which questions occur in rows.

    grams: the n-grams of the rows. least: the smallest share of a question's n-grams that a row
    must contain to be a hit.
    """
    import numpy as np

    positions, members = index.find_members(test_index, grams.hashes)
    rows = np.searchsorted(grams.ends, positions, "right")
    # A row counts each n-gram once; `first` is where it occurs first.
    _, first = np.unique(rows * len(test_index.hashes) + members, return_index=True)
    first.sort()
    positions = positions[first]
    members = members[first]
    rows = rows[first]
    stops = test_index.ends[members]
    counts = stops - np.where(members > 0, test_index.ends[members - 1], 0)
    total = np.cumsum(counts)
    offsets = np.arange(int(total[-1]) if len(total) else 0) - np.repeat(total - counts, counts)
    questions = test_index.postings[np.repeat(stops - counts, counts) + offsets]
    pairs = np.repeat(rows, counts) * len(test_index.sizes) + questions
    distinct, start, pair_counts = np.unique(pairs, return_index=True, return_counts=True)
    questions = distinct % max(1, len(test_index.sizes))
    rows = distinct // max(1, len(test_index.sizes))
    shares = pair_counts / test_index.sizes[questions]
    is_hit = shares >= least
    at = np.repeat(positions, counts)[start]
    before = np.where(rows > 0, grams.ends[rows - 1], 0)
    return Hits(rows[is_hit], questions[is_hit], shares[is_hit], (at - before)[is_hit])


class TestSetRule:
    """Finds test questions in batches of rows, and counts them.

    least: see find_hits. report_only: drop nothing.
    """

    __test__ = False  # pytest collects classes with this name otherwise

    def __init__(self, test_index: Index, least: float, report_only: bool) -> None:
        self.hits = TestHits()
        self._index = test_index
        self._least = least
        self._report_only = report_only

    def check(self, batch: RowBatch) -> RowVerdict:
        """Return which rows contain a question, with the best hit of each."""
        import numpy as np

        batch_hits = find_hits(self._index, hash_batch(batch), self._least)
        values = _note_hits(batch, self._index, batch_hits, self.hits)
        is_hit = np.zeros(len(batch.rows), bool)
        is_hit[batch_hits.rows] = not self._report_only
        return RowVerdict(is_hit, values)

    def finish(self, tally: Tally) -> None:
        """Add the counts to a tally."""
        tally.test_hits.add(self.hits)


def start_rules(row_options: RowOptions) -> list[BatchRule]:
    """Return the rule that drops rows with test questions.

    While the corpus is sampled, return a rule that counts n-grams instead.
    """
    assert isinstance(row_options, PreparedOptions)
    if row_options.counter:
        return [BatchRule(KIND, "", row_options.counter)]
    rule = TestSetRule(
        open_cached(row_options.test_index),
        row_options.decontaminate_share,
        row_options.decontaminate_report_only,
    )
    return [BatchRule(KIND, "contaminated by test questions", rule.check, rule.finish)]


@cache
def open_cached(directory: str) -> Index:
    """Return the index in a directory; each process opens it only once."""
    return index.open_index(Path(directory))


def hash_batch(batch: RowBatch) -> Shingles:
    """Return the n-grams of rows; for a conversation, the n-grams of the user's turns."""
    if any(row.questions for row in batch.rows):
        texts = [_get_text(row) for row in batch.rows]
        return shingles.hash_texts(texts, index.WORDS)
    words = batch.memo(WORDS, lambda rows: find_words(rows.texts))
    return shingles.join_words(words, index.WORDS)


def _note_hits(
    batch: RowBatch, test_index: Index, batch_hits: Hits, hits: TestHits
) -> Sequence[str | None]:
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
            text = quote_gram(_get_text(batch.rows[row]), position)
            place = batch.rows[row].path, batch.rows[row].position
            set_hits.samples.append(HitSample(*place, number, round(share, _DIGITS), text))
    return values


def _get_text(row: RowText) -> str:
    """Return the compared text of a row; for a conversation, the turns of the user."""
    return "\n".join(row.questions) if row.questions else row.text


def quote_gram(text: str, position: int) -> str:
    """Return an n-gram of a text in its compared form. position: number of its first word."""
    normal = text if text.isascii() else unicodedata.normalize("NFC", text)
    (group,) = find_words([text])
    starts = group.words.starts
    end = int(group.words.ends[min(position + index.WORDS, len(starts)) - 1])
    return " ".join(normal.lower()[int(starts[position]) : end].split())
