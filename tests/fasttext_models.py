"""Write tiny fastText classifiers, which recognise a few words, in fastText's binary format."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

LANGUAGES = {
    "en": ("the", "and", "of", "is", "with"),
    "de": ("der", "und", "die", "ist", "mit"),
    "fr": ("le", "et", "les", "est", "avec"),
}
QUALITY = {"hq": ("good",), "cc": ("bad",)}
_CENTROIDS = 256
_SHARPNESS = 12.0  # of the softmax: a text of words with one label gets it with probability 1


def write_classifier(
    path: Path,
    words: Mapping[str, Sequence[str]],
    *,
    is_quantised: bool = False,
    kind: int = 3,
    loss: int = 3,
    bucket: int = 0,
    longest: int = 0,
) -> Path:
    """Write a model in which the words of a label vote for it, and return its path.

    A text gets a label with the softmax over the share of each label's words among the known words
    of the text. kind: 3 classifies. bucket, longest: n-grams of characters up to this length, which
    vote for nothing.
    """
    labels = list(words)
    vocabulary = [(word, number) for number, label in enumerate(labels) for word in words[label]]
    rows = np.zeros((len(vocabulary) + bucket, len(labels)), np.float32)
    for row, (_, number) in enumerate(vocabulary):
        rows[row, number] = 1
    entries = [struct.pack(f"<{len(word) + 1}sqb", word.encode(), 1, 0) for word, _ in vocabulary]
    for label in labels:
        name = f"__label__{label}".encode()
        entries.append(struct.pack(f"<{len(name) + 1}sqb", name, 1, 1))
    dim = len(labels)
    head = struct.pack(
        "<2i12id", 793712314, 12, dim, 5, 5, 1, 5, 1, loss, kind, bucket, 1, longest, 100, 0.0
    )
    sizes = (len(entries), len(vocabulary), len(labels), 1, 0 if is_quantised else -1)
    output = _SHARPNESS * np.eye(dim, dtype=np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        head
        + struct.pack("<3i2q", *sizes)
        + b"".join(entries)
        + struct.pack("<?", is_quantised)
        + (_pack_quantised(rows) if is_quantised else _pack_dense(rows))
        + struct.pack("<?", False)
        + _pack_dense(output)
    )
    return path


def write_tree_classifier(path: Path) -> Path:
    """Write a model like lid.176.ftz with random numbers, and return its path.

    It is quantised, uses n-grams of 2 to 4 characters, of which a third have a row, and has a tree
    of labels.
    """
    draw = np.random.default_rng(0)
    dim = 5
    bucket = 997
    pruned = 300
    words = ["</s>", "the", "und", "é", "</", "дом", "漢字", "a_long_word_of_many_letters"]
    labels = {"de": 70, "en": 40, "zz": 40, "fr": 12, "ru": 5, "aa": 1}
    entries = [(word, 1, 0) for word in words]
    entries += [(f"__label__{label}", count, 1) for label, count in labels.items()]
    index = np.stack([draw.permutation(bucket)[:pruned], draw.permutation(pruned)], axis=1)
    rows = len(words) + pruned
    parts = struct.pack("<4i", dim, 3, 2, 1) + draw.normal(0, 3, (256, dim)).astype("<f4").tobytes()
    path.write_bytes(
        struct.pack("<2i12id", 793712314, 12, dim, 5, 5, 1, 5, 1, 1, 3, bucket, 2, 4, 100, 0.0)
        + struct.pack("<3i2q", len(entries), len(words), len(labels), 1, pruned)
        + b"".join(
            text.encode() + b"\0" + struct.pack("<qb", count, kind) for text, count, kind in entries
        )
        + index.astype("<i4").tobytes()
        + struct.pack("<2?2qi", True, True, rows, dim, 3 * rows)
        + draw.bytes(3 * rows)
        + parts
        + draw.bytes(rows)
        + struct.pack("<4i", 1, 1, 1, 1)
        + draw.random(256).astype("<f4").tobytes()
        + struct.pack("<?", False)
        + _pack_dense(draw.normal(0, 2, (len(labels), dim)))
    )
    return path


def _pack_dense(matrix: np.ndarray) -> bytes:
    return struct.pack("<2q", *matrix.shape) + matrix.astype("<f4").tobytes()


def _pack_quantised(matrix: np.ndarray) -> bytes:
    """Return a matrix whose rows are codes for one of 256 vectors."""
    vectors, codes = np.unique(matrix, axis=0, return_inverse=True)
    dim = matrix.shape[1]
    centroids = np.zeros((_CENTROIDS, dim), "<f4")
    centroids[: len(vectors)] = vectors
    return (
        struct.pack("<?2qi", False, *matrix.shape, len(codes))
        + codes.astype(np.uint8).tobytes()
        + struct.pack("<4i", dim, 1, dim, dim)
        + centroids.tobytes()
    )
