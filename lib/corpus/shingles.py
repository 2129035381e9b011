"""Turn texts into hashes of their word n-grams (shingles), in flat arrays.

Texts are compared in Unicode form NFC and in lower case; digits and accents count. A word is a run
of letters, digits and marks, and everything else separates words. Scripts that are written without
spaces have no such runs: each character of Han, kana, Thai, Lao, Khmer and Myanmar is a word. A
text with fewer words than n has one shingle, a hash of all its words.

The hash of a word depends only on its characters, so ASCII texts, which take a faster path, share
the hashes of their words with all other texts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

VERSION = 1  # of the hashes; signatures of another version cannot be compared
BATCH_CHARACTERS = 1 << 17  # arrays of more characters would not fit the caches of a core
_BITS = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2⁶⁴
_SEPARATOR, _LETTER, _UNIT = range(3)
_WORD_CATEGORIES = "LMN"  # letters, marks, numbers
_LAST_CODE = 0x32400  # code points from here on separate words
_UNITS = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x19E0, 0x19FF)),
    *((0xA9E0, 0xA9FF), (0xAA60, 0xAA7F)),
    *((0x2E80, 0x2FDF), (0x3005, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
    *((0x20000, 0x323AF), (0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    (0x1B000, 0x1B16F),
)


class Shingles(NamedTuple):
    """Contain the shingles of several texts.

    hashes: uint64, text after text, with repetitions. ends: int64 [texts], where those of each text
    end.
    """

    hashes: np.ndarray
    ends: np.ndarray


def draw_odd_numbers(count: int, seed: int) -> np.ndarray:
    """Return odd numbers (uint64 [count]) that look random; they are the same everywhere."""
    import numpy as np

    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_BASE)
    return mix(steps + np.uint64(seed)) | np.uint64(1)


def mix(values: np.ndarray) -> np.ndarray:
    """Return uint64 values whose bits all depend on all bits of the given ones, one to one."""
    import numpy as np

    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_texts(texts: Sequence[str], words: int) -> Shingles:
    """Return the shingles of texts. words: number of words in a shingle.

    The texts together should have at most BATCH_CHARACTERS characters; a longer text should be
    alone, because then its hashes do not depend on its neighbours.
    """
    import numpy as np

    groups: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(texts):
        groups[text.isascii()].append(number)
    if not groups[0] or not groups[1]:
        return _hash_group(texts, words)
    counts = np.zeros(len(texts), np.int64)
    results = []
    for members in groups:
        shingles = _hash_group([texts[number] for number in members], words)
        counts[members] = np.diff(shingles.ends, prepend=0)
        results.append(shingles)
    ends = np.cumsum(counts)
    hashes = np.empty(int(ends[-1]), np.uint64)
    for members, shingles in zip(groups, results, strict=True):
        own = np.zeros(len(texts), bool)
        own[members] = True
        hashes[np.repeat(own, counts)] = shingles.hashes
    return Shingles(hashes, ends)


def _hash_group(texts: Sequence[str], words: int) -> Shingles:
    """Return the shingles of texts that are all ASCII, or all processed as Unicode."""
    import numpy as np

    joined = "\n".join(texts)  # a newline separates words, and does not affect its neighbours
    if joined.isascii():
        codes = np.frombuffer(joined.lower().encode(), np.uint8)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    else:
        parts = [unicodedata.normalize("NFC", text).lower() for text in texts]
        joined = "\n".join(parts)
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = np.minimum(codes, np.uint32(_LAST_CODE))
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    starts, hashes = _hash_words(codes)
    text_ends = np.cumsum(lengths + 1)
    return _join_words(hashes, np.searchsorted(starts, text_ends), words)


def _hash_words(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each word starts (int64) and its hash (uint64). codes: of characters."""
    import numpy as np

    kinds = _character_kinds()[codes]
    results = []
    first = 0
    while first < len(codes):
        last = min(first + BATCH_CHARACTERS, len(codes))
        if last < len(codes):  # do not cut a word, unless it fills the batch
            breaks = np.flatnonzero(kinds[first:last] != _LETTER)
            last = first + int(breaks[-1]) + 1 if len(breaks) else last
        starts, hashes = _hash_batch(codes[first:last], kinds[first:last])
        results.append((starts + first, hashes))
        first = last
    if len(results) == 1:
        return results[0]
    return (
        np.concatenate([np.empty(0, np.int64), *(starts for starts, _ in results)]),
        np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in results)]),
    )


def _hash_batch(codes: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where words start and their hashes, for at most BATCH_CHARACTERS characters.

    A word's hash is the sum of the values of its characters, each multiplied by a power of its
    position in the word. Sums of all characters so far give it by one subtraction.
    """
    import numpy as np

    padded = np.zeros(len(kinds) + 2, np.uint8)
    padded[1:-1] = kinds
    before = padded[:-1]
    after = padded[1:]
    changes = before != after
    if kinds.max(initial=0) == _UNIT:
        changes |= after == _UNIT
        edges = np.flatnonzero(changes)
        starts = edges[:-1][after[edges[:-1]] != _SEPARATOR]
        ends = edges[1:][before[edges[1:]] != _SEPARATOR]
    else:
        edges = np.flatnonzero(changes)
        starts = edges[::2]
        ends = edges[1::2]
    powers, inverses, values = _character_tables()
    if codes.dtype == np.uint8:
        terms = values[codes]
    else:
        terms = mix(codes.astype(np.uint64) + np.uint64(_BASE))
    terms *= powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])
    return starts, mix((sums[ends] - sums[starts]) * inverses[starts])


def _join_words(hashes: np.ndarray, ends: np.ndarray, words: int) -> Shingles:
    """Return the shingles of texts. hashes: of all words. ends: where the words of a text end."""
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
    full = mix(combined[is_first])
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

    whole = counts.astype(np.uint64)
    for number, factor in enumerate(draw_odd_numbers(words, 2)):
        has_word = counts > number
        whole[has_word] += hashes[starts[has_word] + number] * factor
    return mix(whole)


@cache
def _character_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the powers of the base, their inverses, and the values of the ASCII characters."""
    import numpy as np

    def list_powers(base: int) -> np.ndarray:
        powers = np.full(BATCH_CHARACTERS + 1, base, np.uint64)
        powers[0] = 1
        return np.cumprod(powers)

    values = mix(np.arange(128, dtype=np.uint64) + np.uint64(_BASE))
    return list_powers(_BASE), list_powers(pow(_BASE, -1, 1 << 64)), values


@cache
def _character_kinds() -> np.ndarray:
    """Return for each code point whether it separates words, is in a word, or is a word."""
    import numpy as np

    kinds = np.zeros(_LAST_CODE + 1, np.uint8)
    for code in range(_LAST_CODE):
        kinds[code] = unicodedata.category(chr(code))[0] in _WORD_CATEGORIES
    for first, last in _UNITS:
        kinds[first : last + 1] *= _UNIT
    return kinds
