"""Draw loss curves as text: one run as blocks, two runs as letters."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

LABEL_WIDTH = 13
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=*#@"
_CURVE_ROWS = 8
_PAIR_ROWS = 14
_MOST_COLUMNS = 100
_STEEP_SHARE = 0.1  # the first part of the axis, whose higher losses are drawn in the top row
_LETTERS = "AB"
_BOTH = "*"


class PlotPoint(NamedTuple):
    """A point of a curve. x: steps or tokens."""

    x: float
    loss: float


def supports_unicode() -> bool:
    """Return whether standard output can show characters outside of ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def render_curve(losses: list[float], width: int, steps: tuple[int, int]) -> list[str]:
    """Return the lines of a loss curve. A column is the mean of an equal number of rows.

    steps: first and last step of the axis.
    """
    columns = max(10, min(width - LABEL_WIDTH - 2, _MOST_COLUMNS, len(losses)))
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
        text = "".join(blocks[c - 1] if c else " " for c in cells)
        lines.append(f"{labels.get(row, ''):>{LABEL_WIDTH}} {text}")
    return [*lines, _draw_axis(len(means), f"step {steps[0]:,}", f"{steps[1]:,}"), ""]


def render_pair(
    curves: Sequence[Sequence[PlotPoint]], width: int, end: float, labels: tuple[str, str]
) -> list[str]:
    """Return the lines of a plot of two curves, A and B, from 0 to `end`; * for both.

    labels: for the two ends of the axis. Return [] if a curve has no points up to `end`.
    """
    inside = [[p for p in curve if p.x <= end and math.isfinite(p.loss)] for curve in curves]
    if not all(inside) or not end:
        return []
    columns = max(10, min(width - LABEL_WIDTH - 2, _MOST_COLUMNS, max(map(len, inside))))
    means = [_mean_by_column(points, columns, end) for points in inside]
    # The first steps of a run from scratch would squeeze the rest into a few rows.
    later = [x for curve in means for x in curve[round(_STEEP_SHARE * columns) :]]
    known = [x for x in later if math.isfinite(x)]
    if not known:
        return []
    low = min(known)
    span = (max(known) - low) or 1.0
    grid = [list(" ".ljust(columns)) for _ in range(_PAIR_ROWS)]
    for letter, curve in zip(_LETTERS, means, strict=True):
        for column, loss in enumerate(curve):
            if math.isfinite(loss):
                share = min(max((loss - low) / span, 0.0), 1.0)
                row = grid[_PAIR_ROWS - 1 - round(share * (_PAIR_ROWS - 1))]
                row[column] = letter if row[column] in (" ", letter) else _BOTH
    numbers = {0: f"{low + span:.4f}", _PAIR_ROWS - 1: f"{low:.4f}"}
    lines = [
        f"{numbers.get(number, ''):>{LABEL_WIDTH}} {''.join(row).rstrip()}"
        for number, row in enumerate(grid)
    ]
    return [*lines, _draw_axis(columns, *labels)]


def _mean_by_column(points: Sequence[PlotPoint], columns: int, end: float) -> list[float]:
    """Return the mean loss of the points in each column, NaN for a column without points."""
    cells: list[list[float]] = [[] for _ in range(columns)]
    for point in points:
        cells[min(columns - 1, int(point.x / end * columns))].append(point.loss)
    return [_mean(cell) for cell in cells]


def _mean(losses: Sequence[float]) -> float:
    known = [x for x in losses if math.isfinite(x)]
    return statistics.fmean(known) if known else math.nan


def _draw_axis(columns: int, first: str, last: str) -> str:
    gap = max(columns - len(first) - len(last), 4)
    return f"{'':{LABEL_WIDTH}} {first}{' to ':^{gap}}{last}"
