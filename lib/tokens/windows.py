"""Samples as windows of the token stream, across documents: `--packing concat`."""

from __future__ import annotations

import numpy as np

from lib.tokens.samples import Rows, Samples
from lib.tokens.store import Numbers


class Windows(Samples):
    """Sample i is tokens [i·T, i·T + T], T + 1 of them: T inputs and the token after each.

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
        """Return the label tokens and the tokens without padding of some samples."""
        return len(samples) * self.seq_length, len(samples) * self.seq_length

    def means(self) -> tuple[float, float]:
        """Return the label tokens and the tokens without padding of a sample on average."""
        return self.seq_length, self.seq_length
