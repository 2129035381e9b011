"""What a numbered sample is, whatever the way of packing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from lib.tokens import order

IGNORED = -100  # the label that no loss is computed for


class Rows(NamedTuple):
    """int64 [samples, T] each; positions None: they run from 0 to T - 1."""

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None


class Samples(ABC):
    """Samples numbered from 0: windows of the token stream, packs of documents, or a mixture.

    most_documents: in a sample, its padding counted as one.
    """

    most_documents = 1

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
