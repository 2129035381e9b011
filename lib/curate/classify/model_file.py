"""Check a fastText model file and read its labels, before fastText itself opens it.

fastText ends its process, or reads beyond its arrays, if a file is cut or damaged. So each size in
the file is compared with the others and with the size of the file. The format: a head with the
settings, a dictionary of words and labels, an optional index of pruned n-grams, and two matrices.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from lib.core import units
from lib.core.errors import ArtifactError

PREFIX = "__label__"  # the file stores each label with this prefix
_MAGIC = 793_712_314
_VERSIONS = (11, 12)
_SUPERVISED = 3  # the kind of a model that classifies
_LOSSES = range(1, 5)
_HEAD = "<14id"  # mark, version and settings
_ENTRY = "<qb"  # the count and type that follow the text of an entry in the dictionary
_LABEL = 1  # a type of an entry
_MOST_COUNT = 10**15  # the largest count of a label that fastText's Huffman tree can hold
_CENTROIDS = 256  # centroids for each part of a quantised row
_LARGEST_ROW = 1 << 20  # numbers in a row of a matrix


class _InvalidModel(Exception):
    """Raised with the reason why a file is not a fastText classifier that can be opened."""


class _Reader:
    """Reads numbers from the bytes of a file, and raises _InvalidModel at its end."""

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
            raise _InvalidModel(
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
                raise _InvalidModel("it does not begin as fastText writes it")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _check_model(_Reader(data))
    except FileNotFoundError:
        raise ArtifactError(f"{option} {path} does not exist") from None
    except (OSError, _InvalidModel) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArtifactError(
            f"{option} {path} is not a fastText classifier, or is damaged",
            expected="a file that fastText wrote with `supervised` or `quantize`, "
            "such as lid.176.ftz",
            found=str(reason),
        ) from None


def _check_model(reader: _Reader) -> list[str]:
    """Check a whole model and return its labels. Raises _InvalidModel if it is damaged."""
    _, version, dim, _, _, _, _, word_ngrams, loss, kind, bucket, _, longest, _, _ = reader.read(
        _HEAD
    )
    if version not in _VERSIONS:
        raise _InvalidModel(f"its format has version {version}, expected 11 or 12")
    if version == _VERSIONS[0]:
        longest = 0  # character n-grams were not used
    if kind != _SUPERVISED:
        raise _InvalidModel("it contains word vectors, but no classifier")
    if loss not in _LOSSES:
        raise _InvalidModel(f"it was trained with an unknown loss ({loss})")
    if not 0 < dim <= _LARGEST_ROW:
        raise _InvalidModel(f"its vectors have {dim:,} numbers")
    if longest < 0:  # fastText would read it as a very large number
        raise _InvalidModel(f"its longest n-gram has {longest:,} characters")
    if bucket < 0 or (bucket == 0 and (word_ngrams > 1 or longest > 0)):
        raise _InvalidModel("it uses n-grams but has no rows for them")
    size, words, count, _, pruned = reader.read("<3i2q")
    if min(words, count - 1) < 0 or size != words + count:
        raise _InvalidModel(f"its dictionary has {words:,} words and {count:,} labels of {size:,}")
    labels = _read_dictionary(reader, words, count)
    if pruned > 0:
        _skip_index(reader, pruned)
    (is_quantised,) = reader.read("<?")
    if pruned >= 0 and not is_quantised:
        raise _InvalidModel("its n-grams are pruned, but its vectors are not quantised")
    _skip_matrix(reader, words + (bucket if pruned < 0 else pruned), dim, is_quantised)
    (is_output_quantised,) = reader.read("<?")
    _skip_matrix(reader, count, dim, is_quantised and is_output_quantised)
    if rest := len(reader.data) - reader.position:
        raise _InvalidModel(f"{units.counted(rest, 'byte')} follow its end")
    return labels


def _read_dictionary(reader: _Reader, words: int, labels: int) -> list[str]:
    """Read the dictionary and return its labels.

    An entry consists of a text, a zero byte, a count and a type.
    """
    data = reader.data
    names = []
    for number in range(words + labels):
        start = reader.position
        end = data.find(b"\0", start)
        if end < 0:
            raise _InvalidModel("its dictionary has no end")
        reader.skip(end - start + 1)
        count, kind = reader.read(_ENTRY)
        if (kind == _LABEL) != (number >= words):
            raise _InvalidModel("its dictionary is not in order")
        if kind == _LABEL:
            if not 0 <= count < _MOST_COUNT:
                raise _InvalidModel("the count of a label is out of range")
            try:
                names.append(data[start:end].decode().removeprefix(PREFIX))
            except UnicodeDecodeError:
                raise _InvalidModel("a label is not UTF-8") from None
    return names


def _skip_index(reader: _Reader, pruned: int) -> None:
    """Skip the index of pruned n-grams, and check that its rows exist."""
    import numpy as np

    start = reader.skip(8 * pruned)
    pairs = np.frombuffer(reader.data[start : start + 8 * pruned], "<i4").reshape(-1, 2)
    if pairs[:, 1].min() < 0 or pairs[:, 1].max() >= pruned:
        raise _InvalidModel("its index of n-grams names rows that do not exist")


def _skip_matrix(reader: _Reader, rows: int, dim: int, is_quantised: bool) -> None:
    """Skip a matrix and check its sizes."""
    if not is_quantised:
        _require_size(rows, dim, *reader.read("<2q"))
        reader.skip(4 * rows * dim)
        return
    (has_norms,) = reader.read("<?")
    own_rows, own_dim, codes = reader.read("<2qi")
    _require_size(rows, dim, own_rows, own_dim)
    start = reader.skip(codes)
    parts = _skip_quantiser(reader, dim)
    if codes != rows * parts:
        raise _InvalidModel(f"it has {codes:,} codes at byte {start:,}, expected {rows * parts:,}")
    if has_norms:
        reader.skip(rows)
        _skip_quantiser(reader, 1)


def _require_size(rows: int, dim: int, own_rows: int, own_dim: int) -> None:
    if (own_rows, own_dim) != (rows, dim):
        raise _InvalidModel(
            f"a matrix has {own_rows:,} × {own_dim:,} numbers, expected {rows:,} × {dim:,}"
        )


def _skip_quantiser(reader: _Reader, dim: int) -> int:
    """Skip a product quantiser, and return in how many parts it divides a row."""
    own_dim, parts, width, last = reader.read("<4i")
    if own_dim != dim or width < 1 or parts != units.ceil_div(dim, width):
        raise _InvalidModel(f"the vectors of {dim:,} numbers are quantised as {own_dim:,}")
    if last != dim - (parts - 1) * width:
        raise _InvalidModel("the parts of quantised vectors do not fit")
    reader.skip(4 * dim * _CENTROIDS)
    return parts
