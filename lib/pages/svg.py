"""Draw charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lib.core import units
from lib.pages.page import render_template
from lib.pages.series import Numbers

COLUMNS = 420  # columns between both ends of an axis, into which values are merged
STYLES = 16  # distinguishable styles of curves
_LEFT = 66  # pixels around the axes; .chart in style.css has the same
_TOP = 36
_BOTTOM = 48
TICKS = 4  # ticks of the horizontal axis, whose labels fit a narrow window
_MOST_MARKS = 60
_TINY = 1e-30  # a logarithmic axis shows smaller values as this one

Labels = Sequence[tuple[str, Callable[[float], str]]]


class Line(NamedTuple):
    """Describes a curve by the least and the largest value in each column.

    low, high: [columns], not finite in a column without values. gaps: columns after which the curve
    is interrupted (bool [columns]). facts: texts about the values, by name. form: any of the words
    `faint`, `marked` (mark the values, if there are few) and `area` (fill from `low` to `high`).
    means: mean of each column, drawn as a line over the band; None for no such line.
    """

    label: str
    low: Numbers
    high: Numbers
    gaps: npt.NDArray[np.bool_]
    facts: Mapping[str, str] = {}
    style: int = 0
    form: str = ""
    means: Numbers | None = None


class Shape(NamedTuple):
    """Contains the SVG paths of a curve, empty for none, and its marks.

    area: between `low` and `high`. marks: shares of the width, and heights in pixels.
    """

    area: Markup
    line: Markup
    marks: list[tuple[float, float]]


def draw_chart(
    key: str,
    title: str,
    unit: str,
    form: str,
    curves: Sequence[Line],
    end: float,
    rows: Labels,
    ticks: Sequence[float] = (),
) -> Markup:
    """Return a chart that is as wide as the element around it. key: ID of the chart.

    Texts and lines keep their size at any width: places along the horizontal axis are shares of the
    width between the axes, and each curve lies in a box that is stretched. form: any of the words
    `wide` (wider and higher), `log` (logarithmic vertical axis) and `zero` (vertical axis from 0;
    the horizontal axis always begins at 0). end: value at the end of the horizontal axis. rows:
    name and format of each row of labels below that axis. ticks: places of these labels (default:
    round numbers up to `end`).
    """
    bottom = 312 if "wide" in form else 232
    low, high = _find_limits(curves, "log" in form, "zero" in form)
    scale: Callable[[npt.ArrayLike], Numbers] = np.log10 if "log" in form else np.asarray

    def place(values: npt.ArrayLike) -> Numbers:
        share = (scale(np.clip(values, low, high)) - scale(low)) / (scale(high) - scale(low))
        return bottom - (bottom - _TOP) * share

    marks = _list_log_ticks(low, high) if "log" in form else list_ticks(low, high, 5)
    labels = [units.count(mark) if abs(mark) >= 10_000 else f"{mark:.6g}" for mark in marks]
    facts = " ".join(
        f"{curve.label}: {', '.join(map(' '.join, curve.facts.items()))}." for curve in curves
    )
    text = render_template(
        "pages/chart.svg.j2",
        key=key,
        title=title,
        unit=unit,
        facts=facts,
        left=4 - _LEFT,
        bottom=bottom,
        height=bottom + _BOTTOM,
        marks=[(float(place(mark)), label) for mark, label in zip(marks, labels, strict=True)],
        rows=rows,
        ticks=ticks or list_ticks(0, end, TICKS),
        end=end,
        curves=[(curve, _trace_curve(curve, place)) for curve in curves],
    )
    return Markup(text)


def _find_limits(curves: Sequence[Line], is_log: bool, from_zero: bool) -> tuple[float, float]:
    """Return the values at both ends of the vertical axis."""
    values = np.concatenate([part for curve in curves for part in (curve.low, curve.high)])
    values = values[np.isfinite(values) & ((values > _TINY) | (not is_log))]
    low = float(values.min(initial=np.inf if len(values) else 1.0))
    high = float(values.max(initial=low))
    if is_log:
        return low / 1.2, high * 1.2
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low)
    if margin <= 1e-9 * abs(high):
        margin = 0.1 * abs(high) or 1.0
    return low if low == 0 else low - margin, high + margin


def list_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers between two numbers."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _list_log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten in a range, and in a short range also 2 and 5 times each."""
    decades = math.log10(high / low)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)), 1 + int(decades / 8))
    ticks = [f * 10.0**power for power in powers for f in ((1, 2, 5) if decades < 2 else (1,))]
    return [tick for tick in ticks if low <= tick <= high]


def _trace_curve(curve: Line, place: Callable[[npt.ArrayLike], Numbers]) -> Shape:
    columns = np.flatnonzero(np.isfinite(curve.low) & np.isfinite(curve.high))
    top = place(curve.high).round(1).tolist()
    bottom = place(curve.low).round(1).tolist()
    means = top if curve.means is None else place(curve.means).round(1).tolist()
    is_band = len(columns) and np.mean(curve.low[columns] < curve.high[columns]) > 0.5
    is_filled = is_band or "area" in curve.form
    gaps = np.flatnonzero(np.diff(np.cumsum(curve.gaps)[columns])) + 1
    area = ""
    line = ""
    for piece in (piece.tolist() for piece in np.split(columns, gaps) if len(piece)):
        if is_filled:  # a filled band keeps a spike visible
            edge = [(x, top[x]) for x in piece] + [(x, bottom[x]) for x in reversed(piece)]
            area += "M" + "L".join(f"{x},{y:g}" for x, y in edge) + "h0"
        if "area" not in curve.form and (curve.means is not None or not is_band):
            points = [(x, y) for x in piece for y in dict.fromkeys((top[x], bottom[x]))]
            points = [(x, means[x]) for x in piece] if is_band else points
            # `h0` makes a dot of a single point.
            line += "M" + "L".join(f"{x},{y:g}" for x, y in points) + "h0"
    is_marked = "marked" in curve.form and len(columns) <= _MOST_MARKS
    marks = [((x + 0.5) / len(top), top[x]) for x in columns.tolist()] if is_marked else []
    return Shape(Markup(area), Markup(line), marks)
