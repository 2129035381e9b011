"""Find repeated lines, paragraphs and word n-grams within texts, by sorting their hashes.

A repeat is an item that equals an earlier item of the same text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from lib.corpus.words import draw_odd_numbers, mix

if TYPE_CHECKING:
    import numpy as np

# Each sorted value consists of a hash and, in its low bits, the number of an item. The number of
# bits must not depend on the other texts of a batch, which has fewer items than that.
_NUMBER_BITS = 20
_LONGEST = 10


class _Sorted(NamedTuple):
    """Contain the numbers of items with equal ones beside each other, in increasing order.

    is_repeat: bool; whether the item equals the one before it.
    """

    numbers: np.ndarray
    is_repeat: np.ndarray


def find_repeats(hashes: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return the numbers of items that repeat earlier ones of the same text, increasing.

    hashes: uint64. texts: the number of the text of each item, increasing.
    """
    import numpy as np

    items = _sort_items(hashes, texts)
    return np.sort(items.numbers[items.is_repeat])


def place_factors(places: np.ndarray) -> np.ndarray:
    """Return an odd number (uint64) for each place in a sequence, to hash the sequence by a sum."""
    import numpy as np

    return mix(places.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def _sort_items(hashes: np.ndarray, texts: np.ndarray) -> _Sorted:
    """Return items sorted; see find_repeats."""
    import numpy as np

    count = len(hashes)
    bits = max(_NUMBER_BITS, count.bit_length())
    packed = hashes >> np.uint64(bits)
    packed <<= np.uint64(bits)
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    numbers = (packed & np.uint64((1 << bits) - 1)).view(np.int64)
    packed >>= np.uint64(bits)
    is_repeat = np.zeros(count, bool)
    np.equal(packed[1:], packed[:-1], out=is_repeat[1:])
    same = np.flatnonzero(is_repeat)
    is_repeat[same] = texts[numbers[same]] == texts[numbers[same - 1]]
    return _Sorted(numbers, is_repeat)


def measure_grams(
    hashes: np.ndarray,
    lengths: np.ndarray,
    text_ends: np.ndarray,
    tops: Collection[int],
    repeats: Collection[int],
) -> dict[int, np.ndarray]:
    """Return, by n, the share of the characters of words that repeated n-grams contain [texts].

    hashes, lengths: of all words. tops: values of n for which this is the most frequent n-gram, its
    characters times the number of its occurrences, if it has two (of several equally frequent ones
    the longest). repeats: values of n for which these are the words of all repeats, each word once.
    A text without words has the share 0.
    """
    import numpy as np

    count = len(text_ends)
    texts = np.repeat(np.arange(count), np.diff(text_ends, prepend=0))
    before = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=before[1:])
    totals = np.maximum(np.diff(before[text_ends], prepend=0), 1)
    factors = draw_odd_numbers(_LONGEST, 5)
    results: dict[int, np.ndarray] = {}
    starts = np.flatnonzero(texts[1:] == texts[:-1])
    sums = hashes[starts] * factors[0]
    for n in range(2, max((*tops, *repeats), default=0) + 1):
        sums += hashes[starts + (n - 1)] * factors[n - 1]
        of_texts = texts[starts]
        items = _sort_items(sums, of_texts)
        later = np.flatnonzero(items.is_repeat)
        is_repeat = np.zeros(len(starts), bool)
        is_repeat[items.numbers[later]] = True
        if n in tops:
            results[n] = _find_top(items, starts, n, before, of_texts, count) / totals
        elif n in repeats:
            results[n] = _cover(starts[is_repeat], n, before, texts, count) / totals
        # NOTE: an n-gram can only be repeated if both (n − 1)-grams in it are.
        is_repeat[items.numbers[later - 1]] = True
        is_next = is_repeat[:-1] & is_repeat[1:]
        is_next &= starts[1:] - starts[:-1] == 1
        starts = starts[:-1][is_next]
        sums = sums[:-1][is_next]
    return results


def _find_top(
    items: _Sorted,
    starts: np.ndarray,
    n: int,
    before: np.ndarray,
    texts: np.ndarray,
    count: int,
) -> np.ndarray:
    """Return the characters of the most frequent n-gram times its occurrences, by text."""
    import numpy as np

    padded = np.zeros(len(items.is_repeat) + 1, bool)
    padded[:-1] = items.is_repeat
    edges = np.flatnonzero(padded[1:] != padded[:-1])  # from the first item of a group to its last
    firsts = items.numbers[edges[::2]]
    occurrences = edges[1::2] - edges[::2] + 1
    words = starts[firsts]
    tops = np.zeros(count, np.int64)
    np.maximum.at(tops, texts[firsts], (occurrences << 32) + before[words + n] - before[words])
    return (tops >> 32) * (tops & 0xFFFFFFFF)


def _cover(
    starts: np.ndarray, n: int, before: np.ndarray, texts: np.ndarray, count: int
) -> np.ndarray:
    """Return the characters of the words in n-grams at increasing starts, each word once."""
    import numpy as np

    previous = np.empty_like(starts)
    previous[:1] = 0
    previous[1:] = starts[:-1] + n
    characters = before[starts + n] - before[np.maximum(starts, previous)]
    return np.bincount(texts[starts], characters, count)
