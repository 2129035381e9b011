"""Draw charts as inline SVG. Knows nothing about runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lib.core import units
from lib.pages.page import Html, escape, tag

COLUMNS = 420  # into which the values between both ends of an axis are merged
STYLES = 8  # of curves that can be told apart
_LEFT = 66  # pixels around the axes
_RIGHT = 16
_TOP = 36
_BOTTOM = 48
_MOST_MARKS = 60
_TINY = 1e-30  # for a logarithmic axis, and less

Numbers = npt.NDArray[np.float64]
Labels = Sequence[tuple[str, Callable[[float], str]]]


class Line(NamedTuple):
    """The least and the largest value in each column, not finite in a column without values.

    gaps: columns after which the curve is interrupted. facts: its values in words, by name. form:
    any of the words `faint`, `marked` (values, if they are few), `area` (from `low` to `high`).
    """

    label: str
    low: Numbers
    high: Numbers
    gaps: npt.NDArray[np.bool_]
    facts: Mapping[str, str] = {}
    style: int = 0
    form: str = ""

    def render(self, path: str, marks: str) -> str:
        """Return the SVG of the curve, with its label as tooltip."""
        title = f"<title>{escape(self.label)}</title>"
        shown = marks if "marked" in self.form else ""
        return f'<g class="s{self.style} {self.form}">{title}<path d="{path}"/>{shown}</g>'

    def legend(self) -> Html:
        """Return a short piece of the curve, and its label."""
        path = "M1,1h26v10h-26z" if "area" in self.form else "M1,6h26"
        piece = self.render(path, '<circle cx="14" cy="6" r="3.5"/>')
        swatch = f'<svg class="swatch" aria-hidden="true" width="28" height="12">{piece}</svg>'
        return tag("span", Html(swatch), self.label)


def draw(
    key: str, title: str, unit: str, form: str, curves: Sequence[Line], end: float, rows: Labels
) -> Html:
    """Return a chart. key: its id. form: any of the words `wide`, `log` and `zero`.

    `zero`: the vertical axis begins at 0, as the horizontal one always does. end: value at the end
    of the horizontal axis. rows: name and format of each row of labels below it.
    """
    pixels = 2.3 if "wide" in form else 1.0  # of a column
    width = round(COLUMNS * pixels)
    bottom = 312 if "wide" in form else 232
    low, high = _find_limits(curves, "log" in form, "zero" in form)
    scale: Callable[[npt.ArrayLike], Numbers] = np.log10 if "log" in form else np.asarray

    def place(values: npt.ArrayLike) -> Numbers:
        share = (scale(np.clip(values, low, high)) - scale(low)) / (scale(high) - scale(low))
        return bottom - (bottom - _TOP) * share

    texts = " ".join(
        f"{curve.label}: {', '.join(map(' '.join, curve.facts.items()))}." for curve in curves
    )
    size = (_LEFT + width + _RIGHT, bottom + _BOTTOM)
    lines = [
        f'<svg role="img" aria-labelledby="{key}-t {key}-d" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}">',
        f'<title id="{key}-t">{escape(title)}, in {escape(unit)}</title>',
        f'<desc id="{key}-d">{escape(texts, 4000)}</desc>',
        f'<text x="4" y="14">{escape(unit)}</text>',
    ]
    for tick in _log_ticks(low, high) if "log" in form else _ticks(low, high, 5):
        y = float(place(tick))
        label = units.count(tick) if abs(tick) >= 10_000 else f"{tick:.6g}"
        lines.append(f'<path class="grid" d="M{_LEFT},{y:.1f}h{width}"/>')
        lines.append(f'<text class="y" x="{_LEFT - 8}" y="{y + 5:.1f}">{label}</text>')
    ticks = _ticks(0, end, round(4 * pixels))
    places = [_LEFT + width * tick / end for tick in ticks]
    marks = "".join(f"M{x:.1f},{bottom}v5" for x in places)
    lines.append(f'<path class="axis" d="M{_LEFT},{bottom}h{width}{marks}"/>')
    for row, (name, show) in enumerate(rows):
        y = bottom + 20 + 18 * row
        lines.append(f'<text x="4" y="{y}">{escape(name)}</text>')
        for x, tick in zip(places, ticks, strict=True):
            lines.append(f'<text class="x" x="{x:.1f}" y="{y}">{escape(show(tick))}</text>')
    lines += [_draw_curve(curve, place, pixels) for curve in curves]
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


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers between two numbers."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two numbers; over few decades also 2 and 5 times a power."""
    decades = math.log10(high / low)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)), 1 + int(decades / 8))
    ticks = [f * 10.0**power for power in powers for f in ((1, 2, 5) if decades < 2 else (1,))]
    return [tick for tick in ticks if low <= tick <= high]


def _draw_curve(curve: Line, place: Callable[[npt.ArrayLike], Numbers], pixels: float) -> str:
    columns = np.flatnonzero(np.isfinite(curve.low) & np.isfinite(curve.high))
    if len(columns) and np.mean(curve.low[columns] < curve.high[columns]) > 0.5:
        curve = curve._replace(form=curve.form if "area" in curve.form else f"{curve.form} band")
    top = place(curve.high).round(1).tolist()
    bottom = place(curve.low).round(1).tolist()
    xs = [f"{_LEFT + column * pixels:g}" for column in range(COLUMNS)]
    path = ""
    gaps = np.flatnonzero(np.diff(np.cumsum(curve.gaps)[columns])) + 1
    for piece in (piece.tolist() for piece in np.split(columns, gaps) if len(piece)):
        points = [(x, top[x]) for x in piece]
        if "area" in curve.form or "band" in curve.form:  # so that a spike stays visible
            points += [(x, bottom[x]) for x in reversed(piece)]
        else:
            points = [(x, y) for x in piece for y in dict.fromkeys((top[x], bottom[x]))]
        # `h0` makes a dot of a single point.
        path += "M" + "L".join(f"{xs[x]},{y:g}" for x, y in points) + "h0"
    marked = columns.tolist() if len(columns) <= _MOST_MARKS else []
    marks = (f'<circle cx="{xs[x]}" cy="{top[x]:g}" r="3.5"/>' for x in marked)
    return curve.render(path, "".join(marks))
