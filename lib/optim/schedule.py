"""Compute the learning rate of a step as a pure function, so that checkpoints need not save it."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant", "wsd")
_DECAY_SHARE = 0.2  # of the steps after the warm-up, in a warmup-stable-decay schedule
_WARMUP_SHARE = 0.05
_WARMUP_MAX = 1000


@dataclass(frozen=True)
class Schedule:
    """A learning rate that warms up linearly to `peak`, then falls to `minimum` by the last step.

    kind: one of KINDS; `constant` stays at `peak`. warmup, total: in steps.
    """

    kind: str
    peak: float
    minimum: float
    warmup: int
    total: int

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.total - 1 - self.warmup)
        return self.minimum + (self.peak - self.minimum) * self._height(min(progress, 1.0))

    def _height(self, progress: float) -> float:
        """Return the share of `peak - minimum` that is left. progress: 0 to 1 after warm-up."""
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.kind == "linear":
            return 1 - progress
        if self.kind == "wsd":
            return min(1.0, (1 - progress) / _DECAY_SHARE)
        return 1.0


def default_warmup(total: int) -> int:
    """Return the default number of warm-up steps: 5 % of the total, at most 1,000."""
    return min(_WARMUP_MAX, int(total * _WARMUP_SHARE))
