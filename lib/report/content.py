"""Compose the page: status, problems, charts, samples, plan, options, versions and events."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from lib.core import units
from lib.pages.page import render_template
from lib.pages.series import EXTREMES
from lib.pages.svg import COLUMNS, STYLES, TICKS, Line, draw_chart, list_ticks
from lib.report import summary
from lib.report.problems import SHOWN, Problem, find_problems
from lib.report.run_data import TOKENS, RunData, read_samples
from lib.runs.events import Event

_SAMPLE_BYTES = 2000
# What curves show. * stands for the name of a dataset, a source of text or a task.
_LEGENDS = {
    "train/loss_mean": "training loss, mean",
    "train/loss": "training loss of a step",
    "eval/loss": "validation loss",
    "eval/loss/*": "validation loss of *",
    "eval/bits_per_byte": "validation split",
    "eval/*/bits_per_byte": "*",
    "eval/*/accuracy": "*",
    "train/grad_norm": "gradient norm",
    "perf/tokens_per_sec": "tokens/s",
    "perf/mfu": "MFU",
    "memory/max_peak_gib": "peak of the launch, all ranks",
    "memory/window_peak_gib": "peak since the previous row",
    "memory/current_gib": "allocated now",
}
_COLUMNS = ("time", "event", "step")  # columns of the table of events
_PHASES = ["time/data", "time/forward", "time/backward", "time/update", "time/total"]
# Title, unit, form, main key and a pattern for other keys of each chart.
_CHARTS = (
    ("Loss", "nats per token", "wide", "train/loss_mean", "train/loss|eval/loss(/.+)?"),
    ("Bits per byte", "bits per byte", "", "eval/bits_per_byte", "eval/.+/bits_per_byte"),
    ("Accuracy in tasks", "share of the items", "zero", "accuracy", "eval/.+/accuracy"),
    ("Gradient norm", "norm before clipping", "log", "train/grad_norm", ""),
    ("Learning rate", "learning rate", "zero", "train/learning_rate", ""),
    ("Speed", "tokens/s of all ranks", "zero", "perf/tokens_per_sec", ""),
    ("MFU", "share of the peak", "zero", "perf/mfu", ""),
    ("Memory", "GiB", "zero", "memory/max_peak_gib", "memory/(window_peak|current)_gib"),
    ("Time of a step", "ms per step", "zero", "time/total", "|".join(_PHASES)),
)


class ReportLimits(NamedTuple):
    """Limits the prompts of each run, the charts, and the rows of a table on a page."""

    samples: int
    charts: int
    rows: int


class Panel(NamedTuple):
    """Describes a chart. id: ID of its element. curves: the run and the key of each curve."""

    title: str
    unit: str
    form: str
    id: str
    curves: list[tuple[RunData, str]]


class Table(NamedTuple):
    """Describes a table about all runs. head: names of the columns, from the second on."""

    title: str
    head: list[str]
    rows: list[list[str]]


class WrittenTexts(NamedTuple):
    """Describes the texts that a run wrote, a row for each prompt, a column for each step."""

    name: str
    head: list[str]
    rows: list[list[str]]


def compose_page(runs: Sequence[RunData], axis: str, end: float, limits: ReportLimits) -> str:
    """Return the page about runs. axis, end: see RunData."""
    panels = _list_panels(runs)
    events = [_list_events(run) for run in runs]
    places = {panel.id for panel in panels[: limits.charts]}
    for number, rows in enumerate(events, 1):
        places |= {f"event-{number}-{row[0]}" for row in rows[: limits.rows]}
    is_alone = len(runs) == 1
    return render_template(
        "report/report.html.j2",
        title=f"Training report: {', '.join(run.name for run in runs)}",
        names=[run.name for run in runs],
        statuses=[summary.describe_status(run) for run in runs],
        tiles=summary.list_figures(runs[0]) if is_alone else {},
        figures=None if is_alone else _compare_runs(runs, "Figures", summary.list_figures),
        problems=[
            (f"{run.name}: {problem.text}", _list_links(number, problem, places))
            for number, run in enumerate(runs, 1)
            for problem in find_problems(run)
        ],
        charts=_draw_charts(runs, panels[: limits.charts], axis, end),
        extremes=EXTREMES,
        charts_left_out=len(panels) - limits.charts,
        samples=[samples for run in runs if (samples := _list_samples(run)).rows],
        sample_bytes=_SAMPLE_BYTES,
        tables=[_compare_runs(runs, *table) for table in summary.TABLES.items()],
        event_columns=_COLUMNS,
        events=events,
        limits=limits,
    )


def _compare_runs(
    runs: Sequence[RunData], title: str, list_texts: Callable[[RunData], Mapping[str, str]]
) -> Table:
    """Return a table with a column for each run."""
    columns = [list_texts(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Table(title, [run.name for run in runs], rows)


def _list_links(number: int, problem: Problem, places: Container[str]) -> list[tuple[str, str]]:
    """Return texts and IDs of a problem's chart and events, if the IDs are in `places`."""
    links = [("see the chart", problem.chart)] if problem.chart else []
    links += [(f"event {event}", f"event-{number}-{event}") for event in problem.events[-5:]]
    return [(text, place) for text, place in links if place in places]


def _list_events(run: RunData) -> list[list[object]]:
    """Return a run's starts, resumes, end and problems with their numbers, the newest first."""
    rows = []
    for number, event in enumerate(run.events, 1):
        if event.get("event") in SHOWN:
            if event["event"] == Event.RESUME:
                event = {**event, "event": f"resumed from step {event.get('step', 0):,}"}
            more = [f"{name} {value}" for name, value in event.items() if name not in _COLUMNS]
            rows.append([number, *(event.get(name, "") for name in _COLUMNS), ", ".join(more)])
    return rows[::-1]


def _list_samples(run: RunData) -> WrittenTexts:
    steps, texts = read_samples(run.experiment.samples)
    rows = [
        [prompt, *(written.get(step, "") for step in steps)] for prompt, written in texts.items()
    ]
    return WrittenTexts(run.name, ["prompt", *(f"step {step:,}" for step in steps)], rows)


def _draw_charts(
    runs: Sequence[RunData], panels: Sequence[Panel], axis: str, end: float
) -> list[tuple[Panel, list[Line], Markup]]:
    """Return the curves and the chart of each panel."""
    longest = max(runs, key=lambda run: run.series[axis].high.max(initial=0))
    points = np.array([np.append(0, longest.series[key].high) for key in (axis, "step")])
    places, steps = points[:, np.isfinite(points[0])]
    rows = [("step", lambda x: f"{np.interp(x, places, steps):,.0f}")]
    round_steps = [tick for tick in list_ticks(0, steps.max() or 1, TICKS) if tick == int(tick)]
    ticks = np.unique(np.interp(round_steps, steps, places)).tolist()
    rows = [("tokens", units.count), *rows] if axis == TOKENS else rows
    charts = []
    for panel in panels:
        curves = _make_curves(runs, panel)
        # A faint curve lies below the others.
        below = sorted(curves, key=lambda curve: curve.form != "faint")
        chart = draw_chart(panel.id, panel.title, panel.unit, panel.form, below, end, rows, ticks)
        charts.append((panel, curves, chart))
    return charts


def _list_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Return the charts of a page.

    A chart of one run shows several keys; a chart of several runs shows one key.
    """
    present = {key for run in runs for key, series in run.series.items() if series}
    is_alone = len(runs) == 1
    panels = []
    for title, unit, form, main, pattern in _CHARTS:
        others = sorted(key for key in present - {main} if re.fullmatch(pattern, key))
        keys = [main, *others] if main in present else others
        size = STYLES if is_alone else 1
        for first in range(0, len(keys), size):
            some = keys[first : first + size]
            note = f", {first + 1} to {first + len(some)}" if len(keys) > size else ""
            name = (
                title + note if is_alone or not pattern else f"{title}: {_name_curve(keys[first])}"
            )
            curves = [(run, key) for run in runs for key in some if run.series[key]]
            place = f"{main}-{first}" if first else main
            shape = form.replace("wide", "") if first else form
            panels.append(Panel(name, unit, shape, place, curves))
    return panels


def _name_curve(key: str) -> str:
    """Return the words for a key: those of `_LEGENDS`, else its last part."""
    for pattern, words in _LEGENDS.items():
        head, star, tail = pattern.partition("*")
        if key == pattern or (star and key.startswith(head) and key.endswith(tail)):
            return words.replace("*", key[len(head) : len(key) - len(tail)])
    return key.rpartition("/")[2].replace("_", " ")


def _make_curves(runs: Sequence[RunData], panel: Panel) -> list[Line]:
    is_alone = len(runs) == 1
    if is_alone and panel.id == _PHASES[-1]:
        return _stack_phases(runs[0])
    curves = []
    for number, (run, key) in enumerate(panel.curves):
        series = run.series[key]
        curve = Line(
            _name_curve(key) if is_alone else run.name,
            series.low,
            series.high,
            series.gaps,
            series.describe(),
            style=number if is_alone else runs.index(run),
            form="marked" if key.startswith("eval/") else "",
            means=series.column_means(),
        )
        if is_alone and number and key == "train/loss":
            curve = curve._replace(style=0, form="faint")
        curves.append(curve)
    return curves


def _stack_phases(run: RunData) -> list[Line]:
    """Return the phases of a step as stacked areas; the last area is the rest of the step."""
    curves = []
    above = np.zeros(COLUMNS)
    for number, key in enumerate(key for key in _PHASES if run.series[key]):
        series = run.series[key]
        means = series.column_means()
        below = above
        above = np.fmax(means, below) if key == _PHASES[-1] else below + means
        label = "rest of the step" if key == _PHASES[-1] else _name_curve(key)
        facts = series.describe()
        curves.append(Line(label, below, above, series.gaps, facts, number, "area"))
    return curves
