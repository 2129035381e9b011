"""Find the words of texts and hash them, in flat arrays, many texts at once.

Texts are compared in Unicode form NFC and in lower case; digits and accents count. A word is a run
of letters, digits and marks, and everything else separates words. Scripts that are written without
spaces have no such runs: each character of Han, kana, Thai, Lao, Khmer and Myanmar is a word, and
is called a unit.

The hash of a word depends only on its characters, so ASCII texts, which take a faster path, share
the hashes of their words with all other texts. Shingles and quality rules use the same words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

WORDS = "words"  # key of the words in a RowBatch, which rules and sidecars share
BATCH_CHARACTERS = 1 << 19  # rules call NumPy hundreds of times for each batch
PIECE_CHARACTERS = 1 << 17  # larger arrays would not fit the caches of a core
# The marks of a character: a kind, which is one of three, and flags.
SEPARATOR, LETTER, UNIT = range(3)
KIND = 3
SPACE, ALPHABETIC, SENTENCE_END, QUOTE, BULLET, WIDE_END = (1 << bit for bit in range(2, 8))
_KEPT_BYTES = 31 << 20
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2⁶⁴
_NEWLINE = 10
_WORD_CATEGORIES = b"LMN"  # letters, marks, numbers
_LETTER_CATEGORY = ord("L")
_LAST_CODE = 0x32400  # code points from here on separate words
_UNITS = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x19E0, 0x19FF)),
    *((0xA9E0, 0xA9FF), (0xAA60, 0xAA7F)),
    *((0x2E80, 0x2FDF), (0x3005, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
    *((0x20000, 0x323AF), (0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    (0x1B000, 0x1B16F),
)
# Flags of characters, for the quality rules. No white space follows a wide end of a sentence.
_FLAGS = {
    SENTENCE_END: ".!?。！？｡؟۔।",
    WIDE_END: "。！？｡",
    QUOTE: "\"'”’»」』",
    BULLET: "-*•‣◦▪●·–",
}


class Words(NamedTuple):
    """Contains the words of several texts.

    starts, ends: int64, positions in the joined texts. hashes: uint64. is_unit: bool. text_ends:
    int64 [texts], where the words of each text end. edges: int64 [texts + 1], where the characters
    of each text start in the joined texts; a newline follows each text.
    """

    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    is_unit: np.ndarray
    text_ends: np.ndarray
    edges: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Return the number of words of each text."""
        counts = self.text_ends.copy()
        counts[1:] -= self.text_ends[:-1]
        return counts


class WordGroup(NamedTuple):
    """Contains the words of all ASCII texts of a batch, or of all other texts.

    members: numbers of the texts in the batch.
    """

    members: list[int]
    words: Words


class Piece(NamedTuple):
    """Contains a piece of joined texts: whole lines, unless a line is longer than a piece.

    first: position of the piece in the joined texts. codes: code points of the characters in lower
    case. marks: uint8, the marks of the characters. starts, ends: positions of the words in the
    piece. sums: uint64 [characters + 1], the sum of the values of all characters before each one.
    """

    first: int
    codes: np.ndarray
    marks: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    sums: np.ndarray

    def hash_spans(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return a hash (uint64) of each span, which depends on the characters of the span alone.

        The hash is the sum of the characters' values, each multiplied by a power that depends on
        its position in the span. One subtraction of `sums` computes it.
        """
        _, inverses, _ = _make_character_tables()
        return mix_bits((self.sums[ends] - self.sums[starts]) * inverses[starts])


def draw_odd_numbers(count: int, seed: int) -> np.ndarray:
    """Return odd numbers (uint64 [count]) that look random; they are the same everywhere."""
    import numpy as np

    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_BASE)
    return mix_bits(steps + np.uint64(seed)) | np.uint64(1)


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Return a permutation of uint64 values in which each bit depends on all bits of the input."""
    import numpy as np

    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def find_words(
    texts: Sequence[str], visit: Callable[[int, Piece], None] | None = None
) -> list[WordGroup]:
    """Return the words of texts, in one or two groups.

    The texts together should have at most BATCH_CHARACTERS characters, and a longer text should be
    alone, because memory grows with them. The words of a text do not depend on its neighbours.
    visit: called with the number of the group and each piece of its texts, in order.
    """
    members: tuple[list[int], list[int]] = ([], [])
    for number, text in enumerate(texts):
        members[text.isascii()].append(number)
    groups: list[WordGroup] = []
    for numbers in members:
        if numbers:
            pieces = _PieceReader([texts[number] for number in numbers])
            words = pieces.read_words(len(groups), visit)
            groups.append(WordGroup(numbers, words))
    return groups


class _PieceReader:
    """Reads texts in pieces: texts that are all ASCII, or texts that are processed as Unicode."""

    def __init__(self, texts: Sequence[str]) -> None:
        import numpy as np

        joined = "\n".join(texts)  # a newline separates words, and does not affect its neighbours
        if joined.isascii():
            characters = joined.lower().encode()
            self._codes = np.frombuffer(characters, np.uint8)
            self._marks = np.frombuffer(characters.translate(_list_ascii_marks()), np.uint8)
            lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        else:
            parts = [unicodedata.normalize("NFC", text).lower() for text in texts]
            joined = "\n".join(parts)
            codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
            self._codes = np.minimum(codes, np.uint32(_LAST_CODE))
            self._marks = np.take(_list_character_marks(), self._codes)
            lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        self._edges = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(lengths + 1, out=self._edges[1:])

    def read_words(self, group: int, visit: Callable[[int, Piece], None] | None) -> Words:
        """Return the words of the texts. group, visit: see find_words."""
        import numpy as np

        starts = [np.empty(0, np.int64)]
        ends = [np.empty(0, np.int64)]
        hashes = [np.empty(0, np.uint64)]
        units = [np.empty(0, bool)]
        first = 0
        while first < len(self._codes):
            last = self._find_cut(first)
            piece = _cut_piece(first, self._codes[first:last], self._marks[first:last])
            if visit:
                visit(group, piece)
            starts.append(piece.starts + first)
            ends.append(piece.ends + first)
            hashes.append(piece.hash_spans(piece.starts, piece.ends))
            units.append((piece.marks[piece.starts] & UNIT) != 0)
            first = last
        all_starts = _join_arrays(starts)
        return Words(
            all_starts,
            _join_arrays(ends),
            _join_arrays(hashes),
            _join_arrays(units),
            np.searchsorted(all_starts, self._edges[1:]),
            self._edges,
        )

    def _find_cut(self, first: int) -> int:
        """Return where the piece from `first` ends: after a line, or after a word of a long line.

        A word that fills a piece is cut. A line that is longer than a piece starts a piece, so its
        cuts do not depend on what is before it.
        """
        import numpy as np

        last = min(first + PIECE_CHARACTERS, len(self._codes))
        if last == len(self._codes):
            return last
        breaks = np.flatnonzero(self._codes[first:last] == _NEWLINE)
        if not len(breaks) and self._codes[last] == _NEWLINE:
            return last
        if not len(breaks):
            breaks = np.flatnonzero((self._marks[first:last] & KIND) != LETTER)
        return first + int(breaks[-1]) + 1 if len(breaks) else last


def _join_arrays(arrays: list[np.ndarray]) -> np.ndarray:
    """Return arrays as one; the first one is empty and only gives the type."""
    import numpy as np

    return arrays[1] if len(arrays) == 2 else np.concatenate(arrays)


def make_empty_piece() -> Piece:
    """Return a piece without characters."""
    import numpy as np

    return _cut_piece(0, np.empty(0, np.uint8), np.empty(0, np.uint8))


def _cut_piece(first: int, codes: np.ndarray, marks: np.ndarray) -> Piece:
    """Return a piece of at most PIECE_CHARACTERS characters, with its words and sums."""
    import numpy as np

    padded = np.zeros(len(marks) + 2, np.uint8)
    np.bitwise_and(marks, np.uint8(KIND), out=padded[1:-1])
    before = padded[:-1]
    after = padded[1:]
    changes = before != after
    if codes.dtype != np.uint8 and padded.max() == UNIT:
        changes |= after == UNIT
        edges = np.flatnonzero(changes)
        starts = edges[:-1][after[edges[:-1]] != SEPARATOR]
        ends = edges[1:][before[edges[1:]] != SEPARATOR]
    else:
        edges = np.flatnonzero(changes)
        starts = edges[::2]
        ends = edges[1::2]
    powers, _, values = _make_character_tables()
    if codes.dtype == np.uint8:
        terms = values[codes]
    else:
        terms = mix_bits(codes.astype(np.uint64) + np.uint64(_BASE))
    terms *= powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])
    return Piece(first, codes, marks, starts, ends, sums)


@cache
def _make_character_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the powers of the base, their inverses, and the values of the ASCII characters."""
    import numpy as np

    def list_powers(base: int) -> np.ndarray:
        powers = np.full(PIECE_CHARACTERS + 1, base, np.uint64)
        powers[0] = 1
        return np.cumprod(powers)

    values = mix_bits(np.arange(128, dtype=np.uint64) + np.uint64(_BASE))
    # NOTE: freeing so large a block makes glibc keep freed memory below that size. Otherwise it
    # returns the arrays of each piece to the kernel, and page faults take longer than the work.
    np.empty(_KEPT_BYTES, np.uint8)
    return list_powers(_BASE), list_powers(pow(_BASE, -1, 1 << 64)), values


def _make_marks(count: int) -> np.ndarray:
    """Return the marks of the first code points, uint8 [count]."""
    import numpy as np

    characters = "".join(map(chr, range(count)))
    categories = "".join(map(unicodedata.category, characters)).encode()[::2]
    marks = np.zeros(count, np.uint8)
    marks[np.isin(np.frombuffer(categories, np.uint8), list(_WORD_CATEGORIES))] = LETTER
    marks[np.frombuffer(categories, np.uint8) == _LETTER_CATEGORY] |= ALPHABETIC
    for first, last in _UNITS:
        units = marks[first : last + 1]
        units[(units & KIND) == LETTER] += UNIT - LETTER
    flagged = {SPACE: re.findall(r"\s", characters), **_FLAGS}
    for flag, members in flagged.items():
        codes = np.array(list(map(ord, members)))
        marks[codes[codes < count]] |= flag
    return marks


@cache
def _list_character_marks() -> np.ndarray:
    """Return the marks of all code points up to _LAST_CODE, which separates words."""
    import numpy as np

    return np.append(_make_marks(_LAST_CODE), np.uint8(SEPARATOR))


@cache
def _list_ascii_marks() -> bytes:
    """Return the marks of the first 256 code points, as a table for bytes.translate."""
    return _make_marks(256).tobytes()
