"""Sum the rows of a fastText model over the words of lines, and keep the sum of each word.

Most words of a text come again. A dict of the words would find their sums, but it would spend most
of the time waiting for memory, since it looks up one word after the other. So a table in NumPy
finds the short words of many lines together, and the dict is left with the new and the long ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lib.corpus.classify import model_file
from lib.corpus.words import mix_bits

if TYPE_CHECKING:
    import numpy as np

END = b"</s>"  # the word at the end of each line
_LABEL = model_file.PREFIX.encode()  # words that begin with it are labels, which do not count
_SPACES = b" \t\n\r\v\f\0"  # fastText separates words by these bytes alone
_IS_SPACE = bytes(code in _SPACES for code in range(256))
_KEPT_WORDS = 1 << 16
_KEPT_BYTES = 8 << 20  # total length of the words that are kept
_HALF = 8  # bytes of each half of a short word


class RowSummer(Protocol):
    """Sums the rows of a model that belong to a word. dim: numbers in a row."""

    dim: int

    def sum_end(self) -> tuple[np.ndarray, int]:
        """Return the sum of rows for the end of a line ([dim]), and their number."""
        ...

    def sum_words(self, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of rows for each word (float64 [words, dim]), and the number of rows."""
        ...


class WordSums:
    """Averages the rows of the words in lines, and keeps the sum of each word."""

    def __init__(self, subwords: RowSummer) -> None:
        import numpy as np

        self._subwords = subwords
        self._sums = np.zeros((2 * _KEPT_WORDS, subwords.dim))
        self._counts = np.zeros(len(self._sums), np.int64)
        self._sums[0], self._counts[0] = subwords.sum_end()
        self._clear()

    def _clear(self) -> None:
        self._numbers: defaultdict[bytes, int] = defaultdict(count(1).__next__, {END: 0})
        self._table = _WordTable(2 * _KEPT_WORDS)
        self._bytes = 0

    def average(self, lines: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of the rows of each line, and whether the line has any row.

        means: float32 [dim of the model, lines].
        """
        import numpy as np

        if len(self._numbers) > _KEPT_WORDS or self._bytes > _KEPT_BYTES:
            self._clear()
        words = _split_lines(lines)
        numbers = self._number_words(words)
        sums = np.add.reduceat(np.take(self._sums, numbers, axis=0), words.firsts, axis=0)
        counts = np.add.reduceat(np.take(self._counts, numbers), words.firsts)
        means = sums.T / np.maximum(counts, 1)
        return means.astype(np.float32), counts > 0

    def _number_words(self, words: _LineWords) -> np.ndarray:
        """Return the number of each word; compute and keep the sums of new words."""
        import numpy as np

        halves, is_short = _read_halves(words)
        numbers = self._table.find(halves)
        missing = np.flatnonzero((numbers < 0) | ~is_short)
        before = len(self._numbers)
        # The dict gives each new word the next number.
        numbers[missing] = list(map(self._numbers.__getitem__, words.list_words(missing)))
        self._table.add(halves[:, missing], numbers[missing], is_short[missing])
        self._add_words([*islice(reversed(self._numbers), len(self._numbers) - before)][::-1])
        return numbers

    def _add_words(self, words: Sequence[bytes]) -> None:
        """Compute and keep the sums of the words with the highest numbers."""
        import numpy as np

        if not words:
            return
        last = len(self._numbers)
        if last > len(self._sums):
            more = last + _KEPT_WORDS - len(self._sums)
            self._sums = np.pad(self._sums, ((0, more), (0, 0)))
            self._counts = np.pad(self._counts, (0, more))
        first = last - len(words)
        self._sums[first:last], self._counts[first:last] = self._subwords.sum_words(words)
        self._bytes += sum(map(len, words))


class _LineWords(NamedTuple):
    """Contains the words of lines.

    data: the lines, each with END and a newline, and zeros after the last one. starts, ends: where
    each word starts and ends in it. firsts: the number of the first word of each line.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray

    def list_words(self, numbers: np.ndarray) -> list[bytes]:
        """Return the words with some numbers."""
        starts = self.starts[numbers].tolist()
        ends = self.ends[numbers].tolist()
        return [self.data[start:end] for start, end in zip(starts, ends, strict=True)]


def _split_lines(lines: Sequence[bytes]) -> _LineWords:
    """Return the words of lines that count, as fastText reads them; each line ends with END."""
    import numpy as np

    separator = b" " + END + b"\n"
    data = separator.join([*lines, b""])
    if data.count(END) > len(lines) or _LABEL in data:
        lines = list(map(_drop_marks, lines))
        data = separator.join([*lines, b""])
    lengths = np.fromiter(map(len, lines), np.int64, len(lines)) + len(separator)
    is_space = np.ones(len(data) + 1, np.uint8)
    is_space[1:] = np.frombuffer(data.translate(_IS_SPACE), np.uint8)
    edges = np.flatnonzero(is_space[1:] != is_space[:-1])
    starts = edges[::2]
    firsts = np.searchsorted(starts, np.cumsum(lengths) - lengths)
    return _LineWords(data + bytes(2 * _HALF), starts, edges[1::2], firsts)


def _drop_marks(line: bytes) -> bytes:
    """Return a line without labels, and without END and what follows it."""
    words = line.replace(b"\0", b" ").split()
    counted = takewhile(lambda word: word != END, words)
    return b" ".join(word for word in counted if not word.startswith(_LABEL))


def _read_halves(words: _LineWords) -> tuple[np.ndarray, np.ndarray]:
    """Return two halves of 8 bytes of each word (uint64 [2, words]), and whether it is short.

    Zeros follow the bytes of a word. No word contains a zero, so the halves of two short words are
    equal only if the words are.
    """
    import numpy as np

    lengths = words.ends - words.starts
    masks = np.array([(1 << 8 * size) - 1 for size in range(_HALF + 1)], np.uint64)
    # Eight bytes from each position on, whether or not the position is a multiple of eight.
    values = np.ndarray(len(words.data) - _HALF + 1, "<u8", words.data, strides=(1,))
    halves = np.empty((2, len(lengths)), np.uint64)
    for number, half in enumerate(halves):
        left = np.clip(lengths - number * _HALF, 0, _HALF)
        np.bitwise_and(values[words.starts + number * _HALF], masks[left], out=half)
    return halves, lengths <= 2 * _HALF


class _WordTable:
    """Finds the numbers of short words from their halves.

    words: words with higher numbers are not kept. A hash of a word names its slot, which contains
    the number of the word, or -1 if it is free. If the slot is taken, the word is in the next one
    that is free. At least half of the slots are.
    """

    def __init__(self, words: int) -> None:
        import numpy as np

        self._halves = np.zeros((2, words), np.uint64)
        self._slots = np.full(2 << words.bit_length(), -1, np.int32)
        self._mask = len(self._slots) - 1

    def find(self, halves: np.ndarray) -> np.ndarray:
        """Return the number of each word (int32), or -1 if it is not in the table."""
        import numpy as np

        slots = self._find_slots(halves)
        numbers = np.take(self._slots, slots)
        others = np.flatnonzero(self._are_others(numbers, halves))
        while len(others):
            slots[others] = (slots[others] + 1) & self._mask
            numbers[others] = self._slots[slots[others]]
            others = others[self._are_others(numbers[others], halves[:, others])]
        return numbers

    def _find_slots(self, halves: np.ndarray) -> np.ndarray:
        """Return the slot that the hash of each word names."""
        import numpy as np

        hashes = mix_bits(mix_bits(halves[0]) + halves[1])
        return (hashes & np.uint64(self._mask)).view(np.int64)

    def _are_others(self, numbers: np.ndarray, halves: np.ndarray) -> np.ndarray:
        """Return whether slots with these numbers contain other words than these."""
        import numpy as np

        is_other = np.take(self._halves[0], numbers) != halves[0]
        is_other |= np.take(self._halves[1], numbers) != halves[1]
        is_other &= numbers >= 0
        return is_other

    def add(self, halves: np.ndarray, numbers: np.ndarray, is_short: np.ndarray) -> None:
        """Add the short ones of some words that the table lacks. A word may come twice."""
        import numpy as np

        added = np.flatnonzero(is_short & (numbers < self._halves.shape[1]))
        numbers = numbers[added]
        halves = halves[:, added]
        self._halves[:, numbers] = halves
        slots = self._find_slots(halves)
        while len(numbers):
            is_free = self._slots[slots] < 0
            self._slots[slots[is_free]] = numbers[is_free]
            is_waiting = self._slots[slots] != numbers
            numbers = numbers[is_waiting]
            slots = (slots[is_waiting] + 1) & self._mask
