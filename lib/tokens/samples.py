"""Index the samples of a token store; cut windows of the token stream (`--packing concat`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from lib.tokens import order
from lib.tokens.store import Labels, Numbers

IGNORED = -100  # the label that no loss is computed for


class SampleArrays(NamedTuple):
    """Holds several samples, int64 [samples, T] each.

    positions: None if they run from 0 to T - 1 in every sample. lengths: int64 [samples], the
    tokens before the padding; None if there is no padding.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None
    lengths: np.ndarray | None = None


class Samples(ABC):
    """Indexes samples from 0: windows of the token stream, packed documents, or a mixture.

    seq_length: tokens in a sample.
    """

    seq_length: int

    @property
    def most_documents(self) -> int:
        """Return the largest number of documents in a sample; padding counts as one."""
        return 1

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    @abstractmethod
    def read_samples(self, numbers: np.ndarray) -> SampleArrays:
        """Return the samples with these indices, int64 [samples]."""

    @abstractmethod
    def token_counts(self, numbers: np.ndarray) -> tuple[int, int]:
        """Return the numbers of label tokens and of tokens without padding in these samples."""

    @abstractmethod
    def mean_counts(self) -> tuple[float, float]:
        """Return the mean numbers of label tokens and of tokens without padding per sample."""

    def label_spans(self, number: int) -> list[tuple[int, int, int]]:
        """Return where the labels of a sample come from, as runs of consecutive tokens.

        Each run is (first column, index of its first label in the tokens of the split, labels). A
        label mask is not applied. Only samples of one split have spans.
        """
        raise NotImplementedError(type(self).__name__)

    def describe(self, count: int) -> dict[str, str]:
        """Return further rows for the printed plan of a run that reads `count` samples."""
        return {}

    def stream(self, first: int, count: int, seed: int) -> np.ndarray:
        """Return the sample indices at positions [first, first + count) of the endless stream."""
        return order.sample_numbers(first, count, len(self), seed)


class Windows(Samples):
    """Cuts windows of the token stream, across documents.

    Sample i consists of the T + 1 tokens from i·T on: T inputs, and the token after each of them.
    An incomplete window at the end is dropped.

    tokens: uint16|uint32 [N]. labels: which tokens are labels; None if all are.
    """

    def __init__(self, tokens: Numbers, seq_length: int, labels: Labels | None = None) -> None:
        self.tokens = tokens
        self.seq_length = seq_length
        self._labels = labels

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def read_samples(self, numbers: np.ndarray) -> SampleArrays:
        """Return inputs and labels. Without a label mask, they are two views of the same tokens."""
        tokens = self.read_windows(numbers)
        labels = tokens[:, 1:]
        if self._labels is not None:
            labels = np.where(self._are_labels(numbers), labels, IGNORED)
        return SampleArrays(tokens[:, :-1], labels, None)

    def read_windows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of windows, int64 [samples, T + 1]."""
        windows = np.empty((len(numbers), self.seq_length + 1), np.int64)
        for window, start in zip(windows, (numbers * self.seq_length).tolist(), strict=True):
            # This copies and widens in one pass.
            window[:] = self.tokens[start : start + self.seq_length + 1]
        return windows

    def token_counts(self, numbers: np.ndarray) -> tuple[int, int]:
        tokens = len(numbers) * self.seq_length
        return tokens if self._labels is None else int(self._are_labels(numbers).sum()), tokens

    def mean_counts(self) -> tuple[float, float]:
        share = 1.0 if self._labels is None else self._labels.total / max(1, len(self.tokens))
        return self.seq_length * share, self.seq_length

    def label_spans(self, number: int) -> list[tuple[int, int, int]]:
        return [(0, number * self.seq_length + 1, self.seq_length)]

    def _are_labels(self, numbers: np.ndarray) -> np.ndarray:
        """Return whether the token after each input is a label, bool [samples, T]."""
        assert self._labels is not None
        are_labels = np.empty((len(numbers), self.seq_length), bool)
        for row, start in zip(are_labels, (numbers * self.seq_length + 1).tolist(), strict=True):
            row[:] = self._labels[start : start + self.seq_length]
        return are_labels
