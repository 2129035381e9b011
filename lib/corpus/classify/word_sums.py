"""Sum the rows of a fastText model over the words of lines, and keep the sum of each word.

Most words of a text come again, so most sums are found and not computed. A dict of the words would
spend most of its time waiting for memory. Here, each word has a hash of 64 bits, and a table finds
the hashes of all words of a batch together.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_BYTES = 8  # bytes of a word that are hashed at a time


class RowSummer(Protocol):
    """Sums the rows of a model that belong to a word. dim: numbers in a row."""

    dim: int

    def sum_end(self) -> tuple[np.ndarray, int]:
        """Return the sum of rows for the end of a line (float64 [dim]), and their number."""
        ...

    def sum_words(self, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of rows for each word (float64 [words, dim]), and the number of rows."""
        ...


class WordSums:
    """Average the rows of the words in lines, and keep the sum of each word."""

    def __init__(self, subwords: RowSummer) -> None:
        import numpy as np

        self._subwords = subwords
        self._sums = np.zeros((2 * _KEPT_WORDS, subwords.dim))
        self._counts = np.zeros(len(self._sums), np.int64)
        self._sums[0], self._counts[0] = subwords.sum_end()
        self._clear()

    def average(self, lines: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of the rows of each line, and whether the line has any row.

        means: float32 [dim of the model, lines].
        """
        import numpy as np

        if self._table.size > _KEPT_WORDS:
            self._clear()
        words = _split_lines(lines)
        numbers = self._number_words(words)
        sums = np.add.reduceat(np.take(self._sums, numbers, axis=0), words.firsts, axis=0)
        counts = np.add.reduceat(np.take(self._counts, numbers), words.firsts)
        means = sums.T / np.maximum(counts, 1)
        return means.astype(np.float32), counts > 0

    def _clear(self) -> None:
        self._table = _HashTable(2 * _KEPT_WORDS)
        self._table.add(_hash_words(_split_lines([b""])))

    def _number_words(self, words: _LineWords) -> np.ndarray:
        """Return the number of each word; compute and keep the sums of new words."""
        import numpy as np

        hashes = _hash_words(words)
        numbers = self._table.find(hashes)
        missing = np.flatnonzero(numbers < 0)
        if not len(missing):
            return numbers
        new, places, inverse = np.unique(hashes[missing], return_index=True, return_inverse=True)
        first = self._table.size
        last = first + len(new)
        self._table.add(new)
        numbers[missing] = first + inverse
        if last > len(self._sums):
            more = last + _KEPT_WORDS - len(self._sums)
            self._sums = np.pad(self._sums, ((0, more), (0, 0)))
            self._counts = np.pad(self._counts, (0, more))
        self._sums[first:last], self._counts[first:last] = self._subwords.sum_words(
            words.list_words(missing[places])
        )
        return numbers


class _LineWords(NamedTuple):
    """Contain the words of lines.

    data: the lines, and zeros after them. starts, ends: where each word starts and ends in it.
    firsts: the number of the first word of each line.
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
    return _LineWords(data + bytes(_BYTES), starts, edges[1::2], firsts)


def _drop_marks(line: bytes) -> bytes:
    """Return a line without labels, and without END and what follows it."""
    words = line.replace(b"\0", b" ").split()
    if END in words:
        del words[words.index(END) :]
    return b" ".join(word for word in words if not word.startswith(_LABEL))


def _hash_words(words: _LineWords) -> np.ndarray:
    """Return a hash of each word (uint64), which depends on the bytes of the word alone."""
    import numpy as np

    # Eight bytes from each position on. A word contains no zeros, so zeros can follow a short one.
    values = np.ndarray(len(words.data) - _BYTES + 1, "<u8", words.data, strides=(1,))
    left = words.ends - words.starts
    masks = _make_masks()
    hashes = mix_bits(values[words.starts] & masks[np.minimum(left, _BYTES)])
    longer = np.flatnonzero(left > _BYTES)
    starts = words.starts[longer]
    left = left[longer]
    while len(longer):
        starts = starts + _BYTES
        left = left - _BYTES
        part = values[starts] & masks[np.minimum(left, _BYTES)]
        hashes[longer] = mix_bits(hashes[longer] + part)
        is_longer = left > _BYTES
        longer = longer[is_longer]
        starts = starts[is_longer]
        left = left[is_longer]
    return hashes


def _make_masks() -> np.ndarray:
    """Return the masks (uint64 [9]) that keep the first 0 to 8 bytes of a value."""
    import numpy as np

    return np.array([(1 << 8 * count) - 1 for count in range(_BYTES + 1)], np.uint64)


class _HashTable:
    """Number hashes from 0 in the order in which they are added. size: number of hashes.

    expected: number of hashes up to which the table does not grow. Each hash has a slot, which its
    low bits name, or one of the next slots if that is taken. A slot contains the number of a hash,
    or -1. At least half of the slots are free.
    """

    def __init__(self, expected: int) -> None:
        self.size = 0
        self._make_slots(expected)

    def _make_slots(self, expected: int) -> None:
        import numpy as np

        slots = 2 << expected.bit_length()  # a power of two
        self._hashes = np.zeros(slots, np.uint64)
        self._slots = np.full(slots, -1, np.int32)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the number of each hash (int32), or -1 if it is not in the table."""
        import numpy as np

        mask = np.uint64(len(self._slots) - 1)
        slots = (hashes & mask).view(np.int64)
        numbers = np.take(self._slots, slots)
        is_other = np.take(self._hashes, numbers) != hashes
        is_other &= numbers >= 0
        others = np.flatnonzero(is_other)
        while len(others):
            slots[others] = (slots[others] + 1) & int(mask)
            found = self._slots[slots[others]]
            numbers[others] = found
            others = others[(found >= 0) & (self._hashes[found] != hashes[others])]
        return numbers

    def add(self, hashes: np.ndarray) -> None:
        """Add distinct hashes that are not in the table."""
        import numpy as np

        first = self.size
        self.size += len(hashes)
        if 2 * self.size > len(self._slots):
            hashes = np.concatenate([self._hashes[:first], hashes])
            first = 0
            self._make_slots(2 * self.size)
        self._hashes[first : self.size] = hashes
        self._place(first)

    def _place(self, first: int) -> None:
        """Write the numbers of the hashes from `first` on to free slots."""
        import numpy as np

        numbers = np.arange(first, self.size, dtype=np.int32)
        mask = len(self._slots) - 1
        slots = (self._hashes[first : self.size] & np.uint64(mask)).view(np.int64)
        while len(numbers):
            is_free = self._slots[slots] < 0
            self._slots[slots[is_free]] = numbers[is_free]
            is_waiting = self._slots[slots] != numbers  # several wanted the same slot
            numbers = numbers[is_waiting]
            slots = (slots[is_waiting] + 1) & mask
