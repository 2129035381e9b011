"""Samples as windows of the token stream, across documents."""

from __future__ import annotations

import numpy as np


class Windows:
    """Sample i is tokens [i·T, i·T + T], T + 1 of them: T inputs and the token after each.

    tokens: uint16|uint32 [N]. len() is the number of whole samples; the tail that fills no
    window is left out.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def take(self, samples: np.ndarray) -> np.ndarray:
        """Return int64 [len(samples), T + 1]."""
        starts = samples * self.seq_length
        windows = [self.tokens[start:start + self.seq_length + 1] for start in starts]
        return np.stack(windows).astype(np.int64)
