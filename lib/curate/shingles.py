"""Turn texts into hashes of their word n-grams (shingles), in flat arrays.

A text with fewer words than n has one shingle, a hash of all its words. words.py defines the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lib.curate.words import BATCH_CHARACTERS, WordGroup, draw_odd_numbers, find_words, mix_bits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BATCH_CHARACTERS", "Shingles", "hash_texts", "join_words"]

VERSION = 1  # version of the hashes; signatures of different versions cannot be compared


class Shingles(NamedTuple):
    """Contains the shingles of several texts.

    hashes: uint64, text after text, with repetitions. ends: int64 [texts], where the hashes of each
    text end.
    """

    hashes: np.ndarray
    ends: np.ndarray


def hash_texts(texts: Sequence[str], words: int) -> Shingles:
    """Return the shingles of texts. words: number of words in a shingle.

    The texts together should have at most BATCH_CHARACTERS characters, and a longer text should be
    alone, because memory grows with them.
    """
    return join_words(find_words(texts), words)


def join_words(groups: Sequence[WordGroup], words: int) -> Shingles:
    """Return the shingles of the texts of a batch from their words. words: see hash_texts."""
    import numpy as np

    results = [_join_words(group.words.hashes, group.words.text_ends, words) for group in groups]
    if len(results) == 1:
        return results[0]
    counts = np.zeros(sum(len(group.members) for group in groups), np.int64)
    for group, shingles in zip(groups, results, strict=True):
        counts[group.members] = np.diff(shingles.ends, prepend=0)
    ends = np.cumsum(counts)
    hashes = np.empty(int(counts.sum()), np.uint64)
    for group, shingles in zip(groups, results, strict=True):
        is_member = np.zeros(len(counts), bool)
        is_member[group.members] = True
        hashes[np.repeat(is_member, counts)] = shingles.hashes
    return Shingles(hashes, ends)


def _join_words(hashes: np.ndarray, ends: np.ndarray, words: int) -> Shingles:
    """Return the shingles of texts.

    hashes: uint64, the hashes of all words. ends: int64 [texts], where the words of each text end.
    words: see hash_texts.
    """
    import numpy as np

    factors = draw_odd_numbers(words, 1)
    counts = np.diff(ends, prepend=0)
    last = max(0, len(hashes) - words + 1)
    combined = np.zeros(last, np.uint64)
    for number, factor in enumerate(factors):
        combined += hashes[number : number + last] * factor
    is_first = np.ones(last, bool)
    for number in range(1, words):  # the last words of a text start no shingle
        positions = ends - number
        is_first[positions[(positions >= 0) & (positions < last)]] = False
    short = np.flatnonzero((counts > 0) & (counts < words))
    shingles = np.where(counts >= words, counts - words + 1, np.minimum(counts, 1))
    shingle_ends = np.cumsum(shingles)
    full = mix_bits(combined[is_first])
    if not len(short):
        return Shingles(full, shingle_ends)
    result = np.empty(int(shingle_ends[-1]), np.uint64)
    is_short = np.zeros(len(result), bool)
    is_short[shingle_ends[short] - 1] = True
    result[~is_short] = full
    result[is_short] = _hash_short(hashes, ends[short] - counts[short], counts[short], words)
    return Shingles(result, shingle_ends)


def _hash_short(
    hashes: np.ndarray, starts: np.ndarray, counts: np.ndarray, words: int
) -> np.ndarray:
    """Return a hash of all words of each text that has fewer than `words` words."""
    import numpy as np

    sums = counts.astype(np.uint64)
    for number, factor in enumerate(draw_odd_numbers(words, 2)):
        has_word = counts > number
        sums[has_word] += hashes[starts[has_word] + number] * factor
    return mix_bits(sums)
