"""The learning rate as a pure function of (step, total steps): there is nothing to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant", "wsd")
_DECAY_SHARE = 0.2  # of a warm-up-stable-decay schedule
_WARMUP_SHARE = 0.05
_WARMUP_MOST = 1000


@dataclass(frozen=True)
class Schedule:
    """Warms up linearly to `peak` in `warmup` steps, then down to `minimum` at the last step."""

    kind: str
    peak: float
    minimum: float
    warmup: int
    total: int

    def lr(self, step: int) -> float:
        """Return the rate that step number `step` (from 0) uses."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.total - 1 - self.warmup)
        return self.minimum + (self.peak - self.minimum) * self._height(min(progress, 1.0))

    def _height(self, progress: float) -> float:
        """Return how far above the minimum the curve is, 1 → 0 over progress 0 → 1."""
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.kind == "linear":
            return 1 - progress
        if self.kind == "wsd":
            return min(1.0, (1 - progress) / _DECAY_SHARE)
        return 1.0


def default_warmup(total: int) -> int:
    """Return 5 % of the steps, at most 1,000."""
    return min(_WARMUP_MOST, int(total * _WARMUP_SHARE))
