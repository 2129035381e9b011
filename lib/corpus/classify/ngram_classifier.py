"""Classify many lines at once with a quantised fastText model, such as lid.176.ftz.

fastText looks up each character n-gram of a line in a hash map. This takes nearly all of its time:
a line of 500 characters has 1,500 n-grams, although only a tenth have a row in the model. Here,
NumPy hashes the n-grams of many words together, and the sum of the rows of each word is kept in
case the word comes again. The scores equal those of fastText except for rounding, because fastText
adds the rows in their order as float32.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lib.corpus.classify import model_file
from lib.corpus.classify.model_file import CENTROIDS, Matrix, ModelFile
from lib.corpus.classify.word_sums import END, WordSums

if TYPE_CHECKING:
    import numpy as np

_LINES = 128  # lines in an array of scores; larger arrays would not fit the caches of a core
_FNV_START = 2166136261
_FNV_PRIME = 16777619
_LEAST_FACTOR = 1e-5  # fastText adds it to a probability before it takes the logarithm
# The rows are rounded to multiples of 1 ÷ _STEPS. Sums of such float64 values have no further
# rounding errors, so they depend neither on their order nor on the words of a batch.
_STEPS = 1 << 30


class NgramClassifier:
    """Computes the scores of all labels for lines of text. labels: sorted."""

    def __init__(self, data: mmap.mmap, model: ModelFile) -> None:
        import numpy as np

        self.labels = sorted(model.labels)
        self._subwords = _Subwords(data, model)
        self._sums = WordSums(self._subwords)
        self._tree = _LabelTree(_read_matrix(data, model.output), model.label_counts)
        self._order = np.argsort(np.array(model.labels))

    @property
    def is_finite(self) -> bool:
        """Return whether all numbers of the model are finite."""
        return self._subwords.is_finite and self._tree.is_finite

    def score_lines(self, lines: Sequence[bytes], least: float) -> np.ndarray:
        """Return the probability of each label (float32 [lines, labels]), 0 if it is below `least`.

        lines: UTF-8. A line without words may have no label.
        """
        import numpy as np

        scores = np.empty((len(lines), len(self.labels)), np.float32)
        for first in range(0, len(lines), _LINES):
            means, has_rows = self._sums.average(lines[first : first + _LINES])
            leaf_scores = self._tree.score(means, least)
            leaf_scores[:, ~has_rows] = 0
            scores[first : first + _LINES] = leaf_scores[self._order].T
        return scores


def open_model(path: Path) -> NgramClassifier | None:
    """Return the classifier of a model; None if it is of another kind, or contains NaN or infinity.

    The file must have passed `model_file.read_labels` before.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        model = model_file.parse_model(data)
        settings = model.settings
        if not (
            settings.loss == model_file.HIERARCHICAL
            and settings.word_ngrams <= 1
            and 2 <= settings.shortest <= settings.longest
            and model.pruned > 0
        ):
            return None
        classifier = NgramClassifier(data, model)
    return classifier if classifier.is_finite else None


def _read_matrix(data: mmap.mmap, matrix: Matrix) -> np.ndarray:
    """Return a matrix of a file as float32 [rows, dim]."""
    import numpy as np

    rows = matrix.rows
    quantiser = matrix.quantiser
    if quantiser is None:
        values = np.frombuffer(data, "<f4", rows * matrix.dim, matrix.start)
        return values.reshape(rows, matrix.dim).copy()
    codes = np.frombuffer(data, np.uint8, rows * quantiser.parts, matrix.start)
    centroids = np.frombuffer(data, "<f4", matrix.dim * CENTROIDS, quantiser.start)
    columns = codes.reshape(rows, quantiser.parts).T
    edges = [*range(0, matrix.dim, quantiser.width), matrix.dim]
    parts = [
        centroids[first * CENTROIDS : last * CENTROIDS].reshape(CENTROIDS, last - first)[column]
        for column, (first, last) in zip(columns, pairwise(edges), strict=True)
    ]
    values = np.concatenate(parts, axis=1)
    if matrix.norm_quantiser:
        norms = np.frombuffer(data, "<f4", CENTROIDS, matrix.norm_quantiser.start)
        values *= norms[np.frombuffer(data, np.uint8, rows, matrix.norms), None]
    return values


class _Subwords:
    """Sums the rows of words and of their n-grams. dim: numbers in a row."""

    def __init__(self, data: mmap.mmap, model: ModelFile) -> None:
        import numpy as np

        settings = model.settings
        rows = _read_matrix(data, model.input)
        self.is_finite = bool(np.isfinite(rows).all())
        self.dim = settings.dim
        self._rows = (np.round(rows.astype(np.float64) * _STEPS) / _STEPS).astype(np.float32)
        self._numbers = _read_words(data, model)
        self._sizes = range(settings.shortest, settings.longest + 1)
        self._buckets = settings.bucket
        # The row for each hash value of an n-gram; the number of rows means that it has no row.
        self._nothing = len(rows)
        self._table = np.full(self._buckets, self._nothing, np.min_scalar_type(self._nothing))
        index = np.frombuffer(data, "<i4", 2 * model.pruned, model.index_start).reshape(-1, 2)
        index = index[(index[:, 0] >= 0) & (index[:, 0] < self._buckets)]
        self._table[index[:, 0]] = model.words + index[:, 1]

    def sum_end(self) -> tuple[np.ndarray, int]:
        """Return the sum of rows for the end of a line (without n-grams), and their number."""
        import numpy as np

        number = self._numbers.get(END)
        return (np.zeros(self.dim), 0) if number is None else (self._rows[number], 1)

    def sum_words(self, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of rows for each word (float64 [words, dim]), and the number of rows."""
        import numpy as np

        characters = _Characters(words)
        ends = characters.ends
        get_number = self._numbers.get
        word_rows = np.array([get_number(word, self._nothing) for word in words])
        is_known = word_rows != self._nothing
        # Each row belongs to the character with which its word or n-gram begins.
        places = [(ends - characters.lengths)[is_known]]
        rows = [word_rows[is_known]]
        for size, hashes in enumerate(characters.hash_ngrams(self._sizes[-1]), 1):
            if size in self._sizes:
                hashes -= hashes // np.uint32(self._buckets) * np.uint32(self._buckets)
                numbers = np.take(self._table, hashes)
                is_found = numbers != self._nothing
                is_found &= characters.left >= size
                places.append(np.flatnonzero(is_found))
                rows.append(numbers[places[-1]])
        place = np.concatenate(places)
        order = np.argsort(place, kind="stable")
        row = np.concatenate(rows)[order]
        sums = np.zeros((len(row) + 1, self.dim))
        np.cumsum(np.take(self._rows, row, axis=0), axis=0, out=sums[1:])
        edges = np.zeros(len(words) + 1, np.int64)
        edges[1:] = np.searchsorted(place[order], ends)
        return np.diff(sums[edges], axis=0), np.diff(edges)


def _read_words(data: mmap.mmap, model: ModelFile) -> dict[bytes, int]:
    """Return the number of each word of a model."""
    numbers = {}
    start = model.dictionary
    for number in range(model.words):
        end = data.find(b"\0", start)
        numbers[data[start:end]] = number
        start = end + 1 + struct.calcsize(model_file.ENTRY)
    return numbers


class _Characters:
    """The characters of words in UTF-8, each word between `<` and `>`.

    lengths: characters of each word. ends: where the characters of each word end. left: for each
    character, the characters from it to the end of its word.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        import numpy as np

        data = np.frombuffer(b"<" + b"><".join(words) + b">", np.uint8)
        starts = np.flatnonzero((data & 0xC0) != 0x80)
        sizes = np.fromiter(map(len, words), np.int64, len(words)) + 2
        self.ends = np.searchsorted(starts, np.cumsum(sizes))
        self.lengths = np.diff(self.ends, prepend=0)
        self.left = np.repeat(self.ends, self.lengths) - np.arange(len(starts))
        self._sizes = np.diff(starts, append=len(data))  # bytes of each character
        # fastText extends bytes as signed numbers.
        self._data = data.view(np.int8).astype(np.int32).view(np.uint32)
        self._starts = starts

    def hash_ngrams(self, longest: int) -> list[np.ndarray]:
        """Return the hashes (FNV-1a) of the n-grams of 1 to `longest` characters.

        Each array contains the hash of the n-gram that begins with each character (uint32). N-grams
        that are longer than the rest of a word have arbitrary hashes.
        """
        import numpy as np

        prime = np.uint32(_FNV_PRIME)
        hashes = np.full(len(self._starts), _FNV_START, np.uint32)
        results = []
        first_bytes = np.take(self._data, self._starts)
        longer = [
            (np.flatnonzero(self._sizes > byte), byte) for byte in range(1, self._sizes.max())
        ]
        for skipped in range(longest):
            hashes = hashes.copy()
            extended = hashes[: len(hashes) - skipped]
            extended ^= first_bytes[skipped:]
            extended *= prime
            for characters, byte in longer:
                others = characters[characters >= skipped]
                values = np.take(self._data, self._starts[others] + byte)
                extended[others - skipped] = (extended[others - skipped] ^ values) * prime
            results.append(hashes)
        return results


class _LabelTree:
    """Computes probabilities with a Huffman tree whose leaves are the labels.

    weights: float32 [labels, dim]; each inner node uses one row. counts: occurrences by label.
    """

    def __init__(self, weights: np.ndarray, counts: Sequence[int]) -> None:
        self._weights = weights[: len(counts) - 1]
        self._leaves = len(counts)
        self._counts = counts

    @property
    def is_finite(self) -> bool:
        """Return whether all weights are finite."""
        import numpy as np

        return bool(np.isfinite(self._weights).all())

    @cached_property
    def _levels(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return the inner nodes of each level, from the root down, with their two children.

        The leaves have the lowest numbers, and the root has the highest.
        """
        import numpy as np

        children = _build_tree(self._counts)
        levels = []
        nodes = [2 * self._leaves - 2]
        while inner := [node for node in nodes if node >= self._leaves]:
            pairs = [children[node - self._leaves] for node in inner]
            levels.append((np.array(inner), *np.array(pairs).T))
            nodes = [child for pair in pairs for child in pair]
        return levels

    def score(self, means: np.ndarray, least: float) -> np.ndarray:
        """Return the probability of each leaf (float32 [labels, lines]), 0 if it is below `least`.

        means: see WordSums.average.
        """
        import numpy as np

        right = np.einsum("nd,dl->nl", self._weights, -means)
        with np.errstate(over="ignore"):
            np.exp(right, out=right)
        right += 1
        np.reciprocal(right, out=right)
        log_right = np.log(right + np.float32(_LEAST_FACTOR))
        log_left = np.log(1 - right + np.float32(_LEAST_FACTOR))
        logs = np.zeros((2 * self._leaves - 1, means.shape[1]), np.float32)
        for nodes, left_children, right_children in self._levels:
            logs[left_children] = logs[nodes] + log_left[nodes - self._leaves]
            logs[right_children] = logs[nodes] + log_right[nodes - self._leaves]
        scores = np.exp(logs[: self._leaves])
        scores[scores < least + _LEAST_FACTOR] = 0
        return scores


def _build_tree(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the two children of each inner node of the Huffman tree, as fastText builds it.

    counts: occurrences by label. The leaves are numbered first, then the inner nodes in the order
    in which they are built.
    """
    leaves = len(counts)
    totals = [*counts, *[model_file.MOST_COUNT] * (leaves - 1)]
    children = []
    leaf = leaves - 1
    node = leaves
    for parent in range(leaves, 2 * leaves - 1):
        pair = []
        for _ in range(2):
            if leaf >= 0 and totals[leaf] < totals[node]:
                pair.append(leaf)
                leaf -= 1
            else:
                pair.append(node)
                node += 1
        totals[parent] = totals[pair[0]] + totals[pair[1]]
        children.append((pair[0], pair[1]))
    return children
