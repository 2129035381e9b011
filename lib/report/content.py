"""Compose the page: status, problems, charts, samples, plan, options, versions and events."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lib.core import units
from lib.pages.page import Html, escape, page, table, tag
from lib.pages.svg import COLUMNS, STYLES, Line, draw
from lib.train.output import summary
from lib.train.output.problems import SHOWN, Problem, find_problems
from lib.train.output.run_data import TOKENS, RunData, read_samples

_SAMPLE_BYTES = 2000
_COLUMNS = ("time", "event", "step")  # of the table of events
_PHASES = ["time/data", "time/forward", "time/backward", "time/update", "time/total"]
# Title, unit, form, main key and other keys (a pattern) of each chart. Several runs show
# only the main key (or the shortest, which is the mean) and eval/loss.
_CHARTS = (
    ("Loss", "nats per token", "wide", "train/loss_mean", "train/loss|eval/loss(/.+)?"),
    ("Bits per byte", "bits per byte", "", "bits", "eval/(.+/)?bits_per_byte"),
    ("Accuracy in tasks", "share of the items", "zero", "accuracy", "eval/(.+/)?accuracy"),
    ("Gradient norm", "norm before clipping", "log", "train/grad_norm", ""),
    ("Learning rate", "learning rate", "zero", "train/learning_rate", ""),
    ("Speed", "tokens/s of all ranks", "zero", "perf/tokens_per_sec", ""),
    ("MFU", "share of the peak", "zero", "perf/mfu", ""),
    ("Memory", "GiB", "zero", "memory/max_peak_gib", "memory/(window_peak|current)_gib"),
    ("Time of a step", "ms per step", "zero", "time/total", ""),
)


def compose(runs: Sequence[RunData], axis: str, end: float, samples: int) -> Html:
    """Return the page about runs. axis, end: see RunData. samples: prompts that are shown."""
    title = f"Training report: {', '.join(run.name for run in runs)}"
    parts: list[object] = [tag("h1", title)]
    for run in runs:
        figures = summary.list_figures(run).items()
        tiles = [tag("div", tag("dt", name), tag("dd", text)) for name, text in figures]
        parts.append(tag("p", summary.describe_status(run), class_="lead"))
        parts.append(tag("dl", *tiles, class_="tiles"))
    problems = [_describe_problem(run, each) for run in runs for each in find_problems(run)]
    parts += [tag("h2", "Problems"), tag("ul", *problems) if problems else tag("p", "None found.")]
    parts += [tag("h2", "Curves"), tag("div", *_draw_charts(runs, axis, end), class_="charts")]
    for run in runs:
        parts += _show_samples(run, samples)
    sections = []
    for heading, list_texts in summary.TABLES.items():
        columns = [list_texts(run) for run in runs]
        if names := dict.fromkeys(name for column in columns for name in column):
            rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
            shown = table("", ["", *(run.name for run in runs)], rows)
            sections.append(tag("section", tag("h2", heading), shown))
    parts.append(tag("div", *sections, class_="charts" if len(runs) < 3 else ""))
    return page(title, [*parts, tag("h2", "Events"), *map(_list_events, runs)])


def _describe_problem(run: RunData, problem: Problem) -> Html:
    links = [("see the chart", problem.chart)] if problem.chart else []
    links += [(f"event {number}", f"{run.name}-{number}") for number in problem.events[-5:]]
    words = [tag("a", text, href=f"#{place}") for text, place in links]
    return tag("li", f"{run.name}: {problem.text}", *words)


def _list_events(run: RunData) -> Html:
    """Return the events of a run except saves, the newest first."""
    rows = []
    for number, event in enumerate(run.events, 1):
        if event.get("event") in SHOWN:
            mark = tag("span", number, id=f"{run.name}-{number}")
            more = [f"{name} {value}" for name, value in event.items() if name not in _COLUMNS]
            rows.append([mark, *(event.get(name, "") for name in _COLUMNS), ", ".join(more)])
    return table(f"Events of {run.name}, the newest first", ["", *_COLUMNS, "more"], rows[::-1])


def _show_samples(run: RunData, most: int) -> list[Html]:
    steps, texts = read_samples(run.experiment.samples)
    rows = []
    for prompt, written in list(texts.items())[:most]:
        cells = [prompt, *(written.get(step, "") for step in steps)]
        rows.append([tag("pre", escape(cell, _SAMPLE_BYTES), dir="auto") for cell in cells])
    note = f"; {len(texts) - most} more prompts are in samples.jsonl" if len(texts) > most else ""
    head = ["prompt", *(f"step {step:,}" for step in steps)]
    shown = table(f"Texts that {run.name} wrote{note}", head, rows)
    return [tag("h2", f"Samples of {run.name}"), shown] if texts else []


def _draw_charts(runs: Sequence[RunData], axis: str, end: float) -> list[Html]:
    longest = max(runs, key=lambda run: run.last.get("step", 0))
    places, steps = (np.append(0, longest.series[key].high) for key in (axis, "step"))
    known = np.isfinite(places)
    rows = [("step", lambda x: f"{np.interp(x, places[known], steps[known]):,.0f}")]
    rows = [("tokens", units.count), *rows] if axis == TOKENS else rows
    figures = []
    for title, unit, form, main, pattern in _CHARTS:
        curves = [curve for run in runs for curve in _make_curves(runs, run, main, pattern)]
        if curves:
            legend = tag("p", *(curve.legend() for curve in curves), class_="legend")
            caption = tag("figcaption", tag("h3", title), legend)
            chart = draw(main, title, unit, form, curves, end, rows)
            values = [[curve.label, *curve.facts.values()] for curve in curves]
            more = table(unit, ["curve", *summary.EXTREMES], values)
            details = tag("details", tag("summary", f"Table: {title}"), more)
            figures.append(tag("figure", caption, chart, details, id=main, class_=form))
    return figures


def _make_curves(runs: Sequence[RunData], run: RunData, main: str, pattern: str) -> list[Line]:
    """Return the curves of a run in the chart of the key `main`."""
    is_alone = len(runs) == 1
    is_stacked = is_alone and main == "time/total"
    matching = sorted(key for key in run.series if re.fullmatch(pattern, key))
    keys = [key for key in (_PHASES if is_stacked else [main, *matching]) if run.series[key]]
    if not is_alone:
        first = main if main in keys else min(keys, key=len, default="")
        keys = [key for key in keys if key in (first, "eval/loss")]
    curves = []
    above = np.zeros(COLUMNS)
    for number, key in enumerate(keys[:STYLES]):
        series = run.series[key]
        curve = Line(
            key if is_alone else f"{run.name}: {key}",
            series.low,
            series.high,
            series.gaps,
            summary.describe_values(run, key),
            style=number if is_alone else runs.index(run),
            form="marked" if key.startswith("eval/") else "",
        )
        if is_stacked:
            below = above
            means = series.column_means()
            above = np.fmax(means, below) if key == main else below + means
            label = f"rest of {key}" if key == main else key
            curve = curve._replace(label=label, low=below, high=above, form="area")
        elif number and key == "train/loss":
            curve = curve._replace(style=0, form="faint")
        curves.append(curve)
    return sorted(curves, key=lambda curve: curve.form != "faint")
