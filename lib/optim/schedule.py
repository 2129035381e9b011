"""Compute the learning rate of a step as a pure function, so that checkpoints need not save it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant", "wsd")
_STABLE = "wsd"  # warm-up, stable, decay
_DECAY_SHARE = 0.2  # of the steps after the warm-up
# The share of the height that is left, by the progress of the decay, both from 0 to 1. The shape
# sqrt falls fast at first; it was the best in Hägele et al. 2024 (arXiv:2405.18392).
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
_WARMUP_SHARE = 0.05
_WARMUP_MAX = 1000


@dataclass(frozen=True)
class Schedule:
    """A learning rate that warms up linearly to `peak`, then falls to `minimum` by the last step.

    kind: see `parse_kind`; `constant` stays at `peak`. warmup, total: in steps.
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
        if self.kind == "constant":
            return 1.0
        if self.kind in _SHAPES:
            return _SHAPES[self.kind](progress)
        share, shape = _split_stable(self.kind)
        return _SHAPES[shape](max(0.0, 1 - (1 - progress) / share))


def parse_kind(text: str) -> str:
    """Return one of KINDS, or `wsd:SHARE[:SHAPE]`, without values that are the defaults.

    Raises argparse.ArgumentTypeError for anything else.
    """
    if text in KINDS:
        return text
    try:
        share, shape = _split_stable(text)
    except ValueError:
        share = 0.0
        shape = ""
    if not 0 < share <= 1 or shape not in _SHAPES:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(KINDS)}, or wsd:SHARE:SHAPE with a share above 0, at most "
            f"1, and one of the shapes {', '.join(_SHAPES)}, got {text!r}"
        )
    shown = f":{shape}" if shape != "linear" else ""
    return f"{_STABLE}:{share:g}{shown}" if shown or share != _DECAY_SHARE else _STABLE


def _split_stable(kind: str) -> tuple[float, str]:
    """Return the share and the shape of the decay. Raises ValueError for another kind."""
    name, share, shape, *rest = [*kind.split(":"), "", ""]
    if name != _STABLE or any(rest):
        raise ValueError(f"no such schedule: {kind}")
    return float(share or _DECAY_SHARE), shape or "linear"


def default_warmup(total: int) -> int:
    """Return the default number of warm-up steps: 5 % of the total, at most 1,000."""
    return min(_WARMUP_MAX, int(total * _WARMUP_SHARE))
