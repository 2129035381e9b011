"""What a numbered sample is, whatever the way of packing, and windows of the token stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from lib.tokens import order
from lib.tokens.store import Labels, Numbers

IGNORED = -100  # the label that no loss is computed for


class Rows(NamedTuple):
    """Holds samples, int64 [samples, T] each; positions None: they run from 0 to T - 1.

    lengths: int64 [samples], the tokens before the padding; None where nothing is padded.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None
    lengths: np.ndarray | None = None


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
        """Return the samples at positions [first, first + count) of the endless stream."""
        return order.sample_numbers(first, count, len(self), seed)


class Windows(Samples):
    """Cuts windows of the token stream, across documents (`--packing concat`).

    Sample i is tokens [i·T, i·T + T], T + 1 of them: T inputs and the token after each.

    tokens: uint16|uint32 [N]; labels: of them, None where each is one. len() is the number of
    whole samples; the tail that fills no window is left out.
    """

    def __init__(self, tokens: Numbers, seq_length: int, labels: Labels | None = None) -> None:
        self.tokens = tokens
        self.seq_length = seq_length
        self._labels = labels

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def rows(self, samples: np.ndarray) -> Rows:
        """Return the samples as inputs and labels, two views of the same tokens without a mask."""
        tokens = self.take(samples)
        if self._labels is None:
            return Rows(tokens[:, :-1], tokens[:, 1:], None)
        return Rows(
            tokens[:, :-1], np.where(self._are_labels(samples), tokens[:, 1:], IGNORED), None
        )

    def take(self, samples: np.ndarray) -> np.ndarray:
        """Return int64 [len(samples), T + 1]."""
        taken = np.empty((len(samples), self.seq_length + 1), np.int64)
        for row, start in zip(taken, (samples * self.seq_length).tolist(), strict=True):
            row[:] = self.tokens[start : start + self.seq_length + 1]  # one pass: copy and widen
        return taken

    def counts(self, samples: np.ndarray) -> tuple[int, int]:
        tokens = len(samples) * self.seq_length
        return tokens if self._labels is None else int(self._are_labels(samples).sum()), tokens

    def means(self) -> tuple[float, float]:
        share = 1.0 if self._labels is None else self._labels.total / max(1, len(self.tokens))
        return self.seq_length * share, self.seq_length

    def _are_labels(self, samples: np.ndarray) -> np.ndarray:
        """Return bool [len(samples), T]: whether the token after each is a label."""
        assert self._labels is not None
        found = np.empty((len(samples), self.seq_length), bool)
        for row, start in zip(found, (samples * self.seq_length + 1).tolist(), strict=True):
            row[:] = self._labels[start : start + self.seq_length]
        return found
