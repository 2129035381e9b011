"""Make synthetic tokens for runs without data: `-d synthetic[:TOKENS]`.

A token depends only on the seed and its position, so any rank can read any sample, and a
resume continues exactly. Small token IDs are frequent and large ones rare, roughly as in text: an
ID is drawn uniformly from the numbers of b bits, and b itself uniformly. So the loss of a model
falls from ln(vocabulary) to the entropy of these frequencies. All arithmetic is in integers, which
gives the same tokens on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from lib.core import units
from lib.core.errors import UsageError
from lib.tokens import order
from lib.tokens.dataset import find_dataset
from lib.tokens.options import DEFAULT_TOKENS, SYNTHETIC, is_synthetic

_MOST_TOKENS = 10**14
_MOST_PACKED = 10**10  # the document ends of more tokens would not fit in host memory
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DOCUMENT_BITS = range(6, 12)  # a document has 64 to 4,095 tokens
_DOCUMENT_STREAM = 1  # stream of pseudorandom words; tokens use stream 0
_AT_ONCE = 1 << 20  # documents to draw at a time


@dataclass(frozen=True)
class SyntheticText:
    """The synthetic tokens that `-d` asks for. tokens: their number in an epoch."""

    tokens: int

    def __str__(self) -> str:
        return f"{SYNTHETIC}:{units.count(self.tokens)}"

    @property
    def fingerprint(self) -> str:
        """Return the identity of the tokens, apart from seed and vocabulary."""
        return f"{SYNTHETIC}/1:{self.tokens}"

    def make_tokens(self, vocabulary: int, seed: int) -> SyntheticTokens:
        """Return the tokens. vocabulary: number of different tokens."""
        return SyntheticTokens(self.tokens, vocabulary, seed)

    def cut_documents(self, seed: int) -> np.ndarray:
        """Return the ends of documents of 64 to 4,095 tokens, int64; the last may be shorter.

        Raises UsageError if there are too many for the memory of the host.
        """
        if self.tokens > _MOST_PACKED:
            raise UsageError(
                f"-d {self} has too many documents to pack",
                expected=f"at most {units.count(_MOST_PACKED)} tokens, or --packing concat",
            )
        return _cut_documents(self.tokens, seed)


class SyntheticTokens:
    """Computes tokens on access, as if an array contained them. length: number of tokens."""

    def __init__(self, length: int, vocabulary: int, seed: int) -> None:
        self.dtype = np.dtype(np.int64)
        self._length = length
        self._vocabulary = vocabulary
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | np.ndarray | int) -> Any:
        """Return the tokens of a slice, or the token at each index."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._length))
        words = order.hash_numbers(np.ravel(index), self._seed)
        numbers = _draw_numbers(words, range(self._vocabulary.bit_length())) - 1
        return (numbers % self._vocabulary).reshape(np.shape(index))[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _cut_documents(tokens: int, seed: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    total = 0
    while total < tokens:
        first = len(parts) * _AT_ONCE
        words = order.hash_numbers(np.arange(first, first + _AT_ONCE), seed, _DOCUMENT_STREAM)
        parts.append(total + np.cumsum(_draw_numbers(words, _DOCUMENT_BITS)))
        total = int(parts[-1][-1])
    ends = np.concatenate(parts)
    return np.minimum(ends[: np.searchsorted(ends, tokens) + 1], tokens)


def _draw_numbers(words: np.ndarray, bits: range) -> np.ndarray:
    """Return a number of b + 1 bits for each pseudorandom word, int64; b is drawn from `bits`."""
    one = np.uint64(1)
    places = np.uint64(bits[0]) + (words >> np.uint64(32)) % np.uint64(len(bits))
    return ((one << places) | (words & ((one << places) - one))).astype(np.int64)


def find_synthetic(arguments: Sequence[str]) -> SyntheticText | None:
    """Return the synthetic tokens for the values of -d; None if the values name datasets.

    Raises UsageError for a wrong number, for a mixture with synthetic tokens, and if there is a
    dataset named `synthetic`.
    """
    typed = [text for text in arguments if is_synthetic(text)]
    if not typed:
        return None
    if len(arguments) > 1:
        raise UsageError(
            f"-d {typed[0]} cannot be mixed with other data", found=", ".join(arguments)
        )
    name, colon, count = typed[0].partition(":")
    if not colon and (path := find_dataset(name)).exists():
        raise UsageError(
            f"-d {name} stands for synthetic tokens, but {path} exists",
            expected=f"-d ./{path} for that dataset, or -d {name}:{units.count(DEFAULT_TOKENS)} "
            "for synthetic tokens",
        )
    return SyntheticText(_parse_count(typed[0], count) if colon else DEFAULT_TOKENS)


def _parse_count(argument: str, text: str) -> int:
    """Return the number of tokens in `synthetic:TOKENS`, such as 1000000, 100M or 1.5B."""
    match = _COUNT.fullmatch(text.replace(",", "").replace("_", ""))
    # As fractions: in floats, 8.2 × 10^6 is less than 8,200,000.
    tokens = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 0 < tokens <= _MOST_TOKENS:
        raise UsageError(
            f"-d {argument}: {text!r} is not a number of tokens",
            expected=f"-d {SYNTHETIC}:TOKENS with a number such as 1000000, 100M or 1.5B, at most "
            f"{units.count(_MOST_TOKENS)}; or -d {SYNTHETIC} for {units.count(DEFAULT_TOKENS)}",
        )
    return tokens
