"""Find repeated lines, paragraphs and word n-grams within texts, by sorting their hashes.

A repeat is an item that equals an earlier item of the same text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from lib.curate.words import BATCH_CHARACTERS, draw_odd_numbers, mix_bits

if TYPE_CHECKING:
    import numpy as np

# Each sorted value consists of a hash and, in its low bits, the number of an item. No batch has
# more items than these bits can count. Their number is constant, so that results do not depend on
# the other texts of a batch.
_NUMBER_BITS = BATCH_CHARACTERS.bit_length()
_LONGEST = 10


class _Repeats(NamedTuple):
    """Contains the items that repeat an item, sorted so that repeats of one item are consecutive.

    ranks: increasing; consecutive for repeats of one item. numbers: of the items. previous: numbers
    of the equal items before them.
    """

    ranks: np.ndarray
    numbers: np.ndarray
    previous: np.ndarray


def find_repeats(hashes: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return the numbers of items that repeat earlier ones of the same text, increasing.

    hashes: uint64 [items]. texts: [items], the number of the text; the items of a text are
    consecutive.
    """
    import numpy as np

    return np.sort(_group_repeats(hashes, texts).numbers)


def place_factors(places: np.ndarray) -> np.ndarray:
    """Return the factor (odd, uint64) of each place, to hash a sequence by a weighted sum."""
    import numpy as np

    return mix_bits(places.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def _group_repeats(hashes: np.ndarray, texts: np.ndarray) -> _Repeats:
    """Return the items that repeat an item of their text; see find_repeats."""
    import numpy as np

    count = len(hashes)
    bits = max(_NUMBER_BITS, count.bit_length())
    packed = hashes >> np.uint64(bits)
    packed <<= np.uint64(bits)
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    ranks = np.flatnonzero((packed[1:] ^ packed[:-1]) < np.uint64(1 << bits))
    mask = np.uint64((1 << bits) - 1)
    numbers = (packed[ranks + 1] & mask).view(np.int64)
    previous = (packed[ranks] & mask).view(np.int64)
    # Indices select faster than a mask whose values vary.
    same = np.flatnonzero(texts[numbers] == texts[previous])
    if len(same) == len(ranks):
        return _Repeats(ranks, numbers, previous)
    return _Repeats(ranks[same], numbers[same], previous[same])


def measure_grams(
    hashes: np.ndarray,
    before: np.ndarray,
    text_ends: np.ndarray,
    tops: Collection[int],
    repeats: Collection[int],
) -> dict[int, np.ndarray]:
    """Return the share of the characters of words in repeated n-grams, by n ([texts]).

    hashes: hashes of all words. before: characters in the words before each word, [words + 1].
    text_ends: where the words of each text end. A text without words has the share 0.

    tops: values of n for which only the most frequent n-gram counts, with its characters times its
    occurrences, if there are two or more. Of several equally frequent n-grams, the longest counts.
    repeats: values of n for which all repeats count, each of their words once.
    """
    import numpy as np

    count = len(text_ends)
    texts = np.repeat(np.arange(count, dtype=np.int32), find_lengths(text_ends))
    totals = np.maximum(find_lengths(before[text_ends]), 1)
    factors = draw_odd_numbers(_LONGEST, 5)
    results: dict[int, np.ndarray] = {}
    starts = np.arange(max(0, len(hashes) - 1))
    sums = hashes[:-1] * factors[0]
    of_texts = texts[:-1].copy()
    crossing = text_ends[(text_ends > 0) & (text_ends < len(hashes))] - 1
    of_texts[crossing] = -1 - crossing  # an n-gram across two texts equals no other n-gram
    for n in range(2, max((*tops, *repeats), default=0) + 1):
        sums += (hashes[1:] if n == 2 else hashes[starts + (n - 1)]) * factors[n - 1]
        repeats_of_n = _group_repeats(sums, of_texts)
        is_repeat = np.zeros(len(starts), bool)
        is_repeat[repeats_of_n.numbers] = True
        if n in tops:
            results[n] = _find_top(repeats_of_n, starts, n, before, of_texts, count) / totals
        elif n in repeats:
            results[n] = (
                _count_covered(starts[np.flatnonzero(is_repeat)], n, before, texts, count) / totals
            )
        # NOTE: an n-gram can only be repeated if both (n − 1)-grams in it are.
        is_repeat[repeats_of_n.previous] = True
        is_next = is_repeat[:-1] & is_repeat[1:]
        is_next &= starts[1:] - starts[:-1] == 1
        following = np.flatnonzero(is_next)
        starts = starts[following]
        sums = sums[following]
        of_texts = of_texts[following]
    return results


def find_lengths(ends: np.ndarray) -> np.ndarray:
    """Return the lengths of consecutive spans, the first of which starts at 0."""
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    return lengths


def _find_top(
    repeats: _Repeats,
    starts: np.ndarray,
    n: int,
    before: np.ndarray,
    texts: np.ndarray,
    count: int,
) -> np.ndarray:
    """Return the characters of the most frequent n-gram times its occurrences, by text."""
    import numpy as np

    is_first = np.ones(len(repeats.ranks), bool)
    np.not_equal(repeats.ranks[1:], repeats.ranks[:-1] + 1, out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    occurrences = np.append(firsts[1:], len(is_first)) - firsts + 1
    grams = repeats.previous[firsts]
    words = starts[grams]
    tops = np.zeros(count, np.int64)
    np.maximum.at(tops, texts[grams], (occurrences << 32) + before[words + n] - before[words])
    return (tops >> 32) * (tops & 0xFFFFFFFF)


def _count_covered(
    starts: np.ndarray, n: int, before: np.ndarray, texts: np.ndarray, count: int
) -> np.ndarray:
    """Return the characters of the words in n-grams at increasing starts, each word once."""
    import numpy as np

    previous = np.empty_like(starts)
    previous[:1] = 0
    previous[1:] = starts[:-1] + n
    characters = before[starts + n] - before[np.maximum(starts, previous)]
    return np.bincount(texts[starts], characters, count)
