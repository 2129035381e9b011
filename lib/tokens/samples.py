"""What a numbered sample is, whatever the way of packing, and windows of the token stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from lib.tokens import order
from lib.tokens.store import Numbers

IGNORED = -100  # the label that no loss is computed for


class Rows(NamedTuple):
    """Holds samples, int64 [samples, T] each; positions None: they run from 0 to T - 1."""

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None


class Samples(ABC):
    """Numbers samples from 0: windows of the token stream, packs of documents, or a mixture."""

    @property
    def most_documents(self) -> int:
        """Return the most documents of a sample, its padding counted as one."""
        return 1

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples an epoch has."""

    @abstractmethod
    def rows(self, samples: np.ndarray) -> Rows:
        """Return the samples of some numbers as inputs, labels and positions."""

    @abstractmethod
    def counts(self, samples: np.ndarray) -> tuple[int, int]:
        """Return the label tokens and the tokens without padding of some samples."""

    def describe(self, numbers: int) -> dict[str, str]:
        """Return what a plan for `numbers` samples says beside their number."""
        return {}

    @abstractmethod
    def means(self) -> tuple[float, float]:
        """Return the label tokens and the tokens without padding of a sample on average."""

    def stream(self, first: int, count: int, seed: int) -> np.ndarray:
        """Return which samples the numbers [first, first + count) of the endless stream stand for.
        """
        return order.sample_numbers(first, count, len(self), seed)


class Windows(Samples):
    """Cuts windows of the token stream, across documents (`--packing concat`).

    Sample i is tokens [i·T, i·T + T], T + 1 of them: T inputs and the token after each.

    tokens: uint16|uint32 [N]. len() is the number of whole samples; the tail that fills no
    window is left out.
    """

    def __init__(self, tokens: Numbers, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def rows(self, samples: np.ndarray) -> Rows:
        """Return the samples as inputs and labels, two views of the same tokens."""
        tokens = self.take(samples)
        return Rows(tokens[:, :-1], tokens[:, 1:], None)

    def take(self, samples: np.ndarray) -> np.ndarray:
        """Return int64 [len(samples), T + 1]."""
        taken = np.empty((len(samples), self.seq_length + 1), np.int64)
        for row, start in zip(taken, (samples * self.seq_length).tolist(), strict=True):
            row[:] = self.tokens[start:start + self.seq_length + 1]  # one pass: copy and widen
        return taken

    def counts(self, samples: np.ndarray) -> tuple[int, int]:
        return len(samples) * self.seq_length, len(samples) * self.seq_length

    def means(self) -> tuple[float, float]:
        return self.seq_length, self.seq_length
