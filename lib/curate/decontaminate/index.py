"""Build the index of the n-grams of all test questions.

A question is compared by its distinct n-grams of eight words. These n-grams do not count:

- n-grams with words that all questions of a set begin or end with, such as an instruction;
- n-grams that more than ten questions of a set share;
- n-grams that are frequent in the dataset (frequency.py).

A question with fewer than 13 n-grams that count (20 words in a row) is unprotected: it is too short
to tell a copy from a coincidence. The report lists these questions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.curate import shingles
from lib.curate.decontaminate.questions import Question

if TYPE_CHECKING:
    import numpy as np

WORDS = 8  # words of an n-gram
SHORTEST = 20  # words of the shortest protected question
FEWEST = SHORTEST - WORDS + 1  # n-grams of the shortest protected question
MOST_QUESTIONS = 10  # questions of a set that may share an n-gram which counts
# The reasons why a question is unprotected.
SHORT = "short"
SHARED = "shared"
FREQUENT = "frequent"
# Bits in a row of the Bloom filter for each n-gram; at most 1 in 16 other n-grams passes a row.
_BITS_PER_GRAM = 16
_SHIFT = 24  # the highest bits of a hash, which do not place it in the second row of the filter
_ARRAYS = ("hashes", "ends", "postings", "sizes", "sets", "numbers", "table")
_SETS = "sets.json"
_NOTHING = 1 << 62  # size of an unprotected question: no row contains so many of its n-grams


@dataclass
class TestSet:
    """Describes a test set.

    unprotected: the increasing numbers of the unprotected questions, by reason. frequent: pairs of
    the number of a question that occurs in sampled rows, but whose n-grams are mostly ignored as
    frequent, and the number of these rows. digest: the digest of the set's file.
    """

    __test__ = False  # pytest collects classes with this name otherwise

    name: str
    questions: int = 0
    unprotected: dict[str, list[int]] = field(default_factory=dict)
    frequent: list[list[int]] = field(default_factory=list)
    digest: str = ""

    @property
    def protected(self) -> int:
        """Return the number of questions that are compared."""
        return self.questions - sum(map(len, self.unprotected.values()))


class Frequent(NamedTuple):
    """Describes the n-grams that are ignored because they are frequent in the dataset.

    rows: number of sampled rows. least: an n-gram is frequent if more rows than this contain it
    outside of copies of its questions. most: it is frequent in any case if more rows than this
    contain it. ignored: number of frequent n-grams. digest: the digest of these n-grams.
    """

    rows: int = 0
    least: int = 0
    most: int = 0
    ignored: int = 0
    digest: str = ""


NO_FREQUENT = Frequent()


class Index(NamedTuple):
    """Contains the n-grams of all questions of all sets.

    hashes: uint64, sorted and distinct. ends: int64 [hashes], where the postings of each hash end.
    postings: int32, the questions that contain a hash, hash after hash. sizes: int64 [questions],
    the number of n-grams. sets: int32 [questions], the number of the set. numbers: int64
    [questions], the number of the question in its set. table: uint8 [2, bytes], a Bloom filter in
    which a hash has one bit in each row.
    """

    hashes: np.ndarray
    ends: np.ndarray
    postings: np.ndarray
    sizes: np.ndarray
    sets: np.ndarray
    numbers: np.ndarray
    table: np.ndarray
    test_sets: list[TestSet]
    frequent: Frequent = NO_FREQUENT


class _SetGrams(NamedTuple):
    """Contains the distinct n-grams of each question of a set, and the number of each question."""

    hashes: list[np.ndarray]
    numbers: list[int]


def build_index(sets: Iterable[tuple[str, Sequence[Question]]]) -> Index:
    """Return the index of some test sets, given with their names."""
    import numpy as np

    hashes: list[np.ndarray] = []
    numbers: list[int] = []
    set_of: list[int] = []
    test_sets: list[TestSet] = []
    for name, questions in sets:
        test_set = TestSet(name, len(questions))
        grams = _find_grams(questions, test_set)
        hashes += grams.hashes
        numbers += grams.numbers
        set_of += [len(test_sets)] * len(grams.numbers)
        test_sets.append(test_set)
    sizes = np.array([*map(len, hashes)], np.int64)
    flat = np.concatenate([np.empty(0, np.uint64), *hashes])
    order = np.argsort(flat, kind="stable")
    distinct, counts = np.unique(flat, return_counts=True)
    postings = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[order]
    return Index(
        distinct,
        np.cumsum(counts),
        postings,
        sizes,
        np.array(set_of, np.int32),
        np.array(numbers, np.int64),
        _make_table(distinct),
        test_sets,
    )


def ignore_frequent(
    index: Index, is_ignored: np.ndarray, together: np.ndarray, least: float
) -> Index:
    """Return the index without frequent n-grams.

    is_ignored: bool [hashes]. together: int64 [questions], number of sampled rows that contain a
    question. least: the share of its n-grams with which they contain it. Questions that keep too
    few n-grams become unprotected.
    """
    import numpy as np

    if not is_ignored.any():
        return index
    counts = np.diff(index.ends, prepend=0)
    is_kept = ~np.repeat(is_ignored, counts)
    postings = index.postings[is_kept]
    remaining = np.bincount(postings, minlength=len(index.sizes)).astype(np.int64)
    is_lost = (remaining < FEWEST) & (index.sizes < _NOTHING)
    test_sets = copy.deepcopy(index.test_sets)
    for question in np.flatnonzero(is_lost):
        unprotected = test_sets[index.sets[question]].unprotected
        unprotected.setdefault(FREQUENT, []).append(int(index.numbers[question]))
    is_missed = is_lost | (index.sizes - remaining >= least * index.sizes)
    for question in np.flatnonzero(is_missed & (together > 0)):
        rows = [int(index.numbers[question]), int(together[question])]
        test_sets[index.sets[question]].frequent.append(rows)
    hashes = index.hashes[~is_ignored]
    return index._replace(
        hashes=hashes,
        ends=np.cumsum(counts[~is_ignored]),
        postings=postings,
        sizes=np.where(remaining < FEWEST, _NOTHING, remaining),
        table=_make_table(hashes),
        test_sets=test_sets,
    )


def save_index(index: Index, directory: Path) -> None:
    """Write an index to a directory."""
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    for name in _ARRAYS:
        array = np.ascontiguousarray(getattr(index, name))
        # If the disk is full, np.save raises an error without an errno.
        with (directory / f"{name}.npy").open("wb") as file:
            header = np.lib.format.header_data_from_array_1_0(array)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)
    text = json.dumps([[vars(test_set) for test_set in index.test_sets], index.frequent])
    (directory / _SETS).write_text(text, encoding="utf-8")


def open_index(directory: Path) -> Index:
    """Return the index in a directory, mapped into memory, which all workers share."""
    import numpy as np

    arrays = [np.load(directory / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
    test_sets, frequent = read_sets(directory)
    return Index._make([*arrays, test_sets, frequent])


def read_sets(directory: Path) -> tuple[list[TestSet], Frequent]:
    """Return the test sets of the index in a directory, and its frequent n-grams."""
    records, frequent = json.loads((directory / _SETS).read_text(encoding="utf-8"))
    return [TestSet(**record) for record in records], Frequent(*frequent)


def find_members(index: Index, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of n-grams that are in the index, and their numbers in it (int64)."""
    import numpy as np

    nothing = np.empty(0, np.int64)
    if not len(index.hashes):
        return nothing, nothing
    positions = np.flatnonzero(_look_up(index.table, 0, hashes))
    values = hashes[positions]
    passed = np.flatnonzero(_look_up(index.table, 1, values))
    positions = positions[passed]
    values = values[passed]
    places = np.searchsorted(index.hashes, values)
    places[places == len(index.hashes)] = 0
    is_member = index.hashes[places] == values
    return positions[is_member], places[is_member]


def _look_up(table: np.ndarray, row: int, hashes: np.ndarray) -> np.ndarray:
    """Return which hashes a row of the Bloom filter may contain (uint8 [hashes]).

    A hash that it contains is never missed; other hashes may be reported as well.
    """
    import numpy as np

    places, bits = _place_hashes(hashes, row, table.shape[1])
    return (np.take(table[row], places) >> bits) & np.uint8(1)


def _place_hashes(hashes: np.ndarray, row: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte of each hash in a row of the table (int64), and its bit in it (uint8)."""
    import numpy as np

    first_bits = hashes << np.uint64(_SHIFT) if row else hashes
    last_bits = hashes >> np.uint64(8) if row else hashes
    places = first_bits >> np.uint64(64 - size.bit_length() + 1)
    return places.view(np.int64), last_bits.astype(np.uint8) & np.uint8(7)


def _make_table(hashes: np.ndarray) -> np.ndarray:
    """Return the table of an index; the size of its rows is a power of two."""
    import numpy as np

    size = 1 << max(3, (len(hashes) * _BITS_PER_GRAM // 8).bit_length())
    table = np.zeros((2, size), np.uint8)
    for row in range(2):
        places, bits = _place_hashes(hashes, row, size)
        np.bitwise_or.at(table[row], places, np.left_shift(np.uint8(1), bits))
    return table


def _find_grams(questions: Sequence[Question], test_set: TestSet) -> _SetGrams:
    """Return the n-grams of a set that count, and add the unprotected questions to `test_set`."""
    import numpy as np

    words = list(_hash_by_text(questions, 1))
    grams = [
        hashes if len(question_words) >= WORDS else hashes[:0]
        for hashes, question_words in zip(_hash_by_text(questions, WORDS), words, strict=True)
    ]
    prefix = _count_common(words)
    suffix = _count_common([hashes[prefix:][::-1] for hashes in words])
    lengths = [len(hashes) - prefix - suffix for hashes in words]
    grams = [
        hashes[prefix : prefix + max(0, length - WORDS + 1)]
        for hashes, length in zip(grams, lengths, strict=True)
    ]
    is_shared = _find_shared(grams)
    result = _SetGrams([], [])
    for question, hashes, shared, length in zip(questions, grams, is_shared, lengths, strict=True):
        # np.unique takes longer for few values.
        grams_of_question = np.sort(_drop_shared(hashes, shared))
        grams_of_question = grams_of_question[
            np.diff(grams_of_question, prepend=~grams_of_question[:1]) != 0
        ]
        if len(grams_of_question) >= FEWEST:
            result.hashes.append(grams_of_question)
            result.numbers.append(question.number)
        else:
            reason = SHORT if length < SHORTEST else SHARED
            test_set.unprotected.setdefault(reason, []).append(question.number)
    return result


def _find_shared(grams: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, for each question, which of its n-grams too many questions share."""
    import numpy as np

    owners = np.repeat(np.arange(len(grams)), [*map(len, grams)])
    flat = np.concatenate([np.empty(0, np.uint64), *grams])
    _, groups = np.unique(flat, return_inverse=True)
    pairs = np.unique(groups * len(grams) + owners)  # a question counts once
    is_shared = np.bincount(pairs // max(1, len(grams))) > MOST_QUESTIONS
    return np.split(is_shared[groups], np.cumsum([*map(len, grams)])[:-1])


def _hash_by_text(questions: Sequence[Question], words: int) -> Iterator[np.ndarray]:
    """Yield the hashes of the n-grams of each question, in their order."""
    batch: list[str] = []
    characters = 0
    for question in questions:
        if batch and characters + len(question.text) > shingles.BATCH_CHARACTERS:
            yield from _split_by_text(batch, words)
            batch = []
            characters = 0
        batch.append(question.text)
        characters += len(question.text)
    yield from _split_by_text(batch, words)


def _split_by_text(texts: list[str], words: int) -> Iterator[np.ndarray]:
    if not texts:
        return
    text_hashes = shingles.hash_texts(texts, words)
    start = 0
    for end in text_hashes.ends.tolist():
        yield text_hashes.hashes[start:end].copy()
        start = end


def _count_common(sequences: Sequence[np.ndarray]) -> int:
    """Return the number of words that all questions begin with; 0 unless questions differ."""
    import numpy as np

    contents = [sequence.tobytes() for sequence in sequences if len(sequence)]
    low = np.frombuffer(min(contents, default=b""), np.uint64)
    high = np.frombuffer(max(contents, default=b""), np.uint64)
    # In sorted order, the words that the first and the last question share are shared by all.
    differences = np.flatnonzero(low[: len(high)] != high[: len(low)])
    if len(differences):
        return int(differences[0])
    return len(low) if len(low) < len(high) else 0


def _drop_shared(grams: np.ndarray, is_shared: np.ndarray) -> np.ndarray:
    """Return the n-grams of a question without shared ones.

    Shared n-grams at the beginning and the end are instructions. The n-grams that overlap them are
    dropped as well, because they mix words of the instruction and of the question.
    """
    import numpy as np

    positions = np.flatnonzero(is_shared)
    if not len(positions):
        return grams
    breaks = np.flatnonzero(np.diff(positions) > WORDS)  # words between them are not shared
    start = 0
    stop = len(grams)
    if positions[0] == 0:
        start = int(positions[breaks[0]] if len(breaks) else positions[-1]) + WORDS
    if positions[-1] == len(grams) - 1:
        stop = int(positions[breaks[-1] + 1] if len(breaks) else positions[0]) - WORDS + 1
    return grams[start : max(start, stop)][~is_shared[start : max(start, stop)]]
