"""Draw charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lib.core import units
from lib.pages.page import Html, escape, tag
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

    def render(self, drawing: str) -> str:
        """Return the SVG of the curve, with its label as tooltip. drawing: paths and marks."""
        title = f"<title>{escape(self.label)}</title>"
        return f'<g class="s{self.style} {self.form}">{title}{drawing}</g>'

    def legend(self) -> Html:
        """Return the entry of the legend: a short piece of the curve, and its label."""
        path = "M1,1h26v10h-26z" if "area" in self.form else "M1,6h26"
        mark = '<circle cx="14" cy="6" r="3.5"/>' if "marked" in self.form else ""
        piece = self.render(f'<path d="{path}"/>{mark}')
        swatch = f'<svg class="swatch" aria-hidden="true" width="28" height="12">{piece}</svg>'
        return tag("span", Html(swatch), self.label)


def draw_chart(
    key: str,
    title: str,
    unit: str,
    form: str,
    curves: Sequence[Line],
    end: float,
    rows: Labels,
    ticks: Sequence[float] = (),
) -> Html:
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

    texts = " ".join(
        f"{curve.label}: {', '.join(map(' '.join, curve.facts.items()))}." for curve in curves
    )
    lines = [
        f'<svg role="img" aria-labelledby="{key}-t {key}-d" class="chart" width="100%" '
        f'height="{bottom + _BOTTOM}">',
        f'<title id="{key}-t">{escape(title)}, in {escape(unit)}</title>',
        f'<desc id="{key}-d">{escape(texts, 4000)}</desc>',
        f'<text x="{4 - _LEFT}" y="14">{escape(unit)}</text>',
    ]
    marks = _list_log_ticks(low, high) if "log" in form else list_ticks(low, high, 5)
    heights = [float(place(mark)) for mark in marks]
    for y, mark in zip(heights, marks, strict=True):
        label = units.count(mark) if abs(mark) >= 10_000 else f"{mark:.6g}"
        lines.append(f'<text class="y" x="-8" y="{y + 5:.1f}">{label}</text>')
        lines.append(f'<line class="grid" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
    for row, (name, _) in enumerate(rows):
        lines.append(f'<text x="{4 - _LEFT}" y="{bottom + 20 + 18 * row}">{escape(name)}</text>')
    lines.append(f'<line class="axis" x2="100%" y1="{bottom}" y2="{bottom}"/>')
    for tick in ticks or list_ticks(0, end, TICKS):
        x = f"{100 * tick / end:.2f}%"
        lines.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        for row, (_, show) in enumerate(rows):
            y = bottom + 20 + 18 * row
            lines.append(f'<text class="x" x="{x}" y="{y}">{escape(show(tick))}</text>')
    lines += [_draw_curve(curve, place, bottom) for curve in curves]
    return Html("\n".join([*lines, "</svg>"]))


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


def _draw_curve(curve: Line, place: Callable[[npt.ArrayLike], Numbers], height: int) -> str:
    count = len(curve.low)
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
    parts = (
        [f'<path class="{"sum" if "area" in curve.form else "band"}" d="{area}"/>'] if area else []
    )
    parts += [f'<path d="{line}"/>'] if line else []
    # The middle of a column is at its number.
    box = f'viewBox="-0.5 0 {count} {height}" preserveAspectRatio="none"'
    drawing = f'<svg {box} width="100%" height="{height}">{"".join(parts)}</svg>'
    if "marked" in curve.form and len(columns) <= _MOST_MARKS:
        for x in columns.tolist():
            drawing += f'<circle cx="{100 * (x + 0.5) / count:.2f}%" cy="{top[x]:g}" r="3.5"/>'
    return curve.render(drawing)
