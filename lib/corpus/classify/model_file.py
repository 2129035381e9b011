"""Check a fastText model file and read its labels, before fastText itself opens it.

fastText ends its process, or reads beyond its arrays, if a file is cut or damaged. So each size in
the file is compared with the others and with the size of the file. The format: a head with the
settings, a dictionary of words and labels, an optional index of pruned n-grams, and two matrices.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import units
from lib.core.errors import ArtifactError

PREFIX = "__label__"  # the file stores each label with this prefix
_MAGIC = 793_712_314
_VERSIONS = (11, 12)
SUPERVISED = 3  # the kind of a model that classifies
HIERARCHICAL = 1  # the loss of a model whose labels are the leaves of a binary tree
_LOSSES = range(HIERARCHICAL, 5)
_SETTINGS = "<12id"
ENTRY = "<qb"  # the count and type that follow the text of an entry in the dictionary
_LABEL = 1  # a type of an entry
MOST_COUNT = 10**15  # the largest count of a label that fastText's Huffman tree can hold
CENTROIDS = 256  # centroids for each part of a quantised row
_LARGEST_ROW = 1 << 20  # numbers in a row of a matrix


class InvalidModel(Exception):
    """Raised with the reason why a file is not a fastText classifier that can be opened."""


class ModelSettings(NamedTuple):
    """The settings of a model.

    kind: SUPERVISED if the model classifies. bucket: number of hash values of n-grams. shortest,
    longest: characters in an n-gram; `longest` is 0 if the model uses no character n-grams.
    """

    dim: int
    word_ngrams: int
    loss: int
    kind: int
    bucket: int
    shortest: int
    longest: int


class Quantiser(NamedTuple):
    """Describes the vectors that replace each part of a row.

    start: position of the centroids in the file, float32 [parts, 256, width], except that the last
    part may be narrower.
    """

    start: int
    parts: int
    width: int


class Matrix(NamedTuple):
    """Describes a matrix. Positions are in the file.

    start: position of the values (float32 [rows, dim]), or of the codes (uint8 [rows, parts]) of a
    quantised matrix. norms: position of the codes of the norms (uint8 [rows]) by which the rows are
    multiplied, -1 if there are none.
    """

    rows: int
    dim: int
    start: int
    quantiser: Quantiser | None = None
    norms: int = -1
    norm_quantiser: Quantiser | None = None


class ModelFile(NamedTuple):
    """Describes a model. Positions are in the file.

    labels: without their prefix. label_counts: occurrences of each label in the training data.
    dictionary: position of the first word. words: number of words. pruned: number of n-grams that
    have a row, -1 if all hash values have one. index_start: position of the pairs (int32) of a hash
    value and a row; row 0 is the first row after those of the words.
    """

    settings: ModelSettings
    labels: list[str]
    label_counts: list[int]
    dictionary: int
    words: int
    pruned: int
    index_start: int
    input: Matrix
    output: Matrix


class _Reader:
    """Reads numbers from the bytes of a file, and raises InvalidModel at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def read(self, form: str) -> tuple[Any, ...]:
        """Return the next values. form: their format in the language of `struct`."""
        start = self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.data, start)

    def skip(self, size: int) -> int:
        """Skip bytes and return their position."""
        start = self.position
        if size < 0 or start + size > len(self.data):
            raise InvalidModel(
                f"it ends after {units.counted(len(self.data), 'byte')}, in the middle of its data"
            )
        self.position += size
        return start


def read_labels(path: Path, option: str) -> list[str]:
    """Return the labels of a classifier without their prefix, in the order of the file.

    option: the option that names the file, for errors. Raises ArtifactError if the file is missing,
    damaged, or no fastText classifier.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != struct.pack("<i", _MAGIC):
                raise InvalidModel("it does not begin as fastText writes it")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_model(data).labels
    except FileNotFoundError:
        raise ArtifactError(f"{option} {path} does not exist") from None
    except (OSError, InvalidModel) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArtifactError(
            f"{option} {path} is not a fastText classifier, or is damaged",
            expected="a file that fastText wrote with `supervised` or `quantize`, "
            "such as lid.176.ftz",
            found=str(reason),
        ) from None


def parse_model(data: mmap.mmap) -> ModelFile:
    """Return what a model file contains. Raises InvalidModel if it is damaged."""
    reader = _Reader(data)
    _, version, *numbers = reader.read("<2i" + _SETTINGS[1:])
    if version not in _VERSIONS:
        raise InvalidModel(f"its format has version {version}, expected 11 or 12")
    dim, _, _, _, _, word_ngrams, loss, kind, bucket, shortest, longest, _, _ = numbers
    if version == _VERSIONS[0]:
        longest = 0
    settings = ModelSettings(dim, word_ngrams, loss, kind, bucket, shortest, longest)
    _check_settings(settings)
    size, words, count, _, pruned = reader.read("<3i2q")
    if min(words, count - 1) < 0 or size != words + count:
        raise InvalidModel(f"its dictionary has {words:,} words and {count:,} labels of {size:,}")
    dictionary = reader.position
    labels, label_counts = _read_dictionary(reader, words, count)
    rows = words + (bucket if pruned < 0 else pruned)
    index = _skip_index(reader, pruned) if pruned > 0 else reader.position
    (is_quantised,) = reader.read("<?")
    if pruned >= 0 and not is_quantised:
        raise InvalidModel("its n-grams are pruned, but its vectors are not quantised")
    vectors = _skip_matrix(reader, rows, dim, is_quantised)
    (is_output_quantised,) = reader.read("<?")
    output = _skip_matrix(reader, count, dim, is_quantised and is_output_quantised)
    if rest := len(reader.data) - reader.position:
        raise InvalidModel(f"{units.counted(rest, 'byte')} follow its end")
    return ModelFile(
        settings, labels, label_counts, dictionary, words, pruned, index, vectors, output
    )


def _check_settings(settings: ModelSettings) -> None:
    if settings.kind != SUPERVISED:
        raise InvalidModel("it contains word vectors, but no classifier")
    if settings.loss not in _LOSSES:
        raise InvalidModel(f"it was trained with an unknown loss ({settings.loss})")
    if not 0 < settings.dim <= _LARGEST_ROW:
        raise InvalidModel(f"its vectors have {settings.dim:,} numbers")
    if settings.longest < 0:  # fastText would read it as a very large number
        raise InvalidModel(f"its longest n-gram has {settings.longest:,} characters")
    uses_ngrams = settings.word_ngrams > 1 or settings.longest > 0
    if settings.bucket < 0 or (settings.bucket == 0 and uses_ngrams):
        raise InvalidModel("it uses n-grams but has no rows for them")


def _read_dictionary(reader: _Reader, words: int, labels: int) -> tuple[list[str], list[int]]:
    """Read the dictionary, and return its labels and their counts.

    An entry consists of a text, a zero byte, a count and a type.
    """
    data = reader.data
    names = []
    counts = []
    for number in range(words + labels):
        start = reader.position
        end = data.find(b"\0", start)
        if end < 0:
            raise InvalidModel("its dictionary has no end")
        reader.skip(end - start + 1)
        count, kind = reader.read(ENTRY)
        if (kind == _LABEL) != (number >= words):
            raise InvalidModel("its dictionary is not in order")
        if kind == _LABEL:
            if not 0 <= count < MOST_COUNT:
                raise InvalidModel("the count of a label is out of range")
            try:
                names.append(data[start:end].decode().removeprefix(PREFIX))
            except UnicodeDecodeError:
                raise InvalidModel("a label is not UTF-8") from None
            counts.append(count)
    return names, counts


def _skip_index(reader: _Reader, pruned: int) -> int:
    """Skip the index of pruned n-grams, check that its rows exist, and return its position."""
    import numpy as np

    start = reader.skip(8 * pruned)
    pairs = np.frombuffer(reader.data[start : start + 8 * pruned], "<i4").reshape(-1, 2)
    if pairs[:, 1].min() < 0 or pairs[:, 1].max() >= pruned:
        raise InvalidModel("its index of n-grams names rows that do not exist")
    return start


def _skip_matrix(reader: _Reader, rows: int, dim: int, is_quantised: bool) -> Matrix:
    """Skip a matrix, check its sizes, and return its description."""
    if not is_quantised:
        _require_size(rows, dim, *reader.read("<2q"))
        return Matrix(rows, dim, reader.skip(4 * rows * dim))
    (has_norms,) = reader.read("<?")
    own_rows, own_dim, codes = reader.read("<2qi")
    _require_size(rows, dim, own_rows, own_dim)
    start = reader.skip(codes)
    quantiser = _skip_quantiser(reader, dim)
    if codes != rows * quantiser.parts:
        expected = rows * quantiser.parts
        raise InvalidModel(f"it has {codes:,} codes at byte {start:,}, expected {expected:,}")
    if not has_norms:
        return Matrix(rows, dim, start, quantiser)
    norms = reader.skip(rows)
    return Matrix(rows, dim, start, quantiser, norms, _skip_quantiser(reader, 1))


def _require_size(rows: int, dim: int, own_rows: int, own_dim: int) -> None:
    if (own_rows, own_dim) != (rows, dim):
        raise InvalidModel(
            f"a matrix has {own_rows:,} × {own_dim:,} numbers, expected {rows:,} × {dim:,}"
        )


def _skip_quantiser(reader: _Reader, dim: int) -> Quantiser:
    """Skip a product quantiser, and return its description."""
    own_dim, parts, width, last = reader.read("<4i")
    if own_dim != dim or width < 1 or parts != units.ceil_div(dim, width):
        raise InvalidModel(f"the vectors of {dim:,} numbers are quantised as {own_dim:,}")
    if last != dim - (parts - 1) * width:
        raise InvalidModel("the parts of quantised vectors do not fit")
    return Quantiser(reader.skip(4 * dim * CENTROIDS), parts, width)
