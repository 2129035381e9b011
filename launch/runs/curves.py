"""Draw loss curves as text."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=*#@"
_CURVE_ROWS = 8
_MOST_COLUMNS = 100


def supports_unicode() -> bool:
    """Return whether standard output can show characters outside of ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def render_curve(losses: list[float], width: int, steps: tuple[int, int]) -> list[tuple[str, str]]:
    """Return the lines of a loss curve with their labels. A column is the mean of some rows.

    width: columns at most. steps: first and last step of the axis.
    """
    columns = max(10, min(width, _MOST_COLUMNS, len(losses)))
    spans = [
        losses[i * len(losses) // columns : (i + 1) * len(losses) // columns]
        for i in range(columns)
    ]
    means = [_mean(span) for span in spans if span]
    known = [x for x in means if math.isfinite(x)]
    if len(known) < 2:
        return []
    low = min(known)
    high = max(known)
    blocks = _BLOCKS if supports_unicode() else _ASCII_BLOCKS
    levels = _CURVE_ROWS * len(blocks)
    heights = [
        0 if not math.isfinite(x) else 1 + round((x - low) / ((high - low) or 1) * (levels - 1))
        for x in means
    ]
    labels = {_CURVE_ROWS - 1: f"{high:.4f}", 0: f"{low:.4f}"}
    lines = []
    for row in range(_CURVE_ROWS - 1, -1, -1):
        cells = (min(max(h - row * len(blocks), 0), len(blocks)) for h in heights)
        lines.append((labels.get(row, ""), "".join(blocks[c - 1] if c else " " for c in cells)))
    return [*lines, ("", _draw_axis(len(means), f"step {steps[0]:,}", f"{steps[1]:,}"))]


def _mean(losses: Sequence[float]) -> float:
    known = [x for x in losses if math.isfinite(x)]
    return statistics.fmean(known) if known else math.nan


def _draw_axis(columns: int, first: str, last: str) -> str:
    gap = max(columns - len(first) - len(last), 4)
    return f"{first}{' to ':^{gap}}{last}"
