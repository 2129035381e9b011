"""Show two runs side by side: figures, options that differ, and their loss curves in one plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from launch.runs.curves import PlotPoint, render_pair
from launch.runs.overview import WIDTH, RunSummary, shorten_text
from launch.runs.run_files import Row
from lib.core import records, run_records, units
from lib.core.paths import Experiment
from lib.core.run_records import mean_loss, one_line
from lib.train.output import journal

_MOST_ROWS = 4_000  # to parse; the plot has 100 columns
_EVALUATION = b'"eval/loss"'
_LABEL_WIDTH = 26
_UNIMPORTANT = {"experiment_name", "save_dir", "config", "overwrite", "num_workers", "no_progress"}
_GIB = 1 << 30


class LossHistory(NamedTuple):
    """The rows of a run for a plot, evenly spaced if there are many, and all validation losses.

    evaluations: pairs of step and loss.
    """

    rows: list[Row]
    evaluations: list[tuple[int, float]]


def read_history(path: Path) -> LossHistory:
    """Return the history of a run from its metrics.jsonl, even if that has a million rows."""
    rows: list[Row] = []
    evaluations: list[tuple[int, float]] = []
    last = b""
    with suppress(OSError), records.open_regular(path) as file:
        every = max(1, _estimate_rows(path) // _MOST_ROWS)
        for number, line in enumerate(file):
            is_evaluation = _EVALUATION in line
            last = line
            if not is_evaluation and number % every:
                continue
            row = run_records.parse_row(line) or {}
            if is_evaluation and "eval/loss" in row:
                evaluations.append((row["step"], row["eval/loss"]))
            if "train/loss" in row and number % every == 0:
                rows.append(row)
    row = run_records.parse_row(last) or {}
    if "train/loss" in row and row not in rows[-1:]:
        rows.append(row)
    return LossHistory(rows, evaluations)


def _estimate_rows(path: Path) -> int:
    """Return the approximate number of rows of a file, from the length of its first rows."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    lines = max(1, head.count(b"\n"))
    return int(path.stat().st_size / max(1, len(head) / lines))


def compare_runs(first: RunSummary, second: RunSummary, width: int) -> list[str]:
    """Return the lines of the comparison of two runs. width: columns of the terminal."""
    runs = (first, second)
    width = min(width, WIDTH)
    histories = [read_history(Experiment(run.path.parent, run.path.name).metrics) for run in runs]
    rows = [("", *(f"{letter}: {run.name}" for letter, run in zip("AB", runs, strict=True)))]
    rows += [("status", *(run.status.word for run in runs))]
    rows += _describe_figures(runs, histories)
    lines = _align_columns(rows, width)
    differences = [(name, *values) for name, *values in list_differences(runs)]
    lines += ["", *_align_columns([("options that differ", "", ""), *differences], width)]
    if not differences:
        lines[-1] = "no options differ"
    return [*lines, *_plot_losses(histories, width)]


def _describe_figures(
    runs: tuple[RunSummary, RunSummary], histories: list[LossHistory]
) -> list[tuple[str, ...]]:
    """Return the rows of the table with figures: a label, and a text for each run."""
    columns = []
    common = min((history.rows[-1]["step"] for history in histories if history.rows), default=0)
    for run, history in zip(runs, histories, strict=True):
        figures = run.figures
        best = min(
            (pair for pair in history.evaluations if math.isfinite(pair[1])),
            key=lambda pair: pair[1],
            default=None,
        )
        nearest = min(history.rows, key=lambda row: abs(row["step"] - common), default=None)
        columns.append(
            {
                "steps": f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else ""),
                "tokens": _format_figure(figures, "train/tokens_seen", units.count),
                "training loss, last": _format_loss(run.loss, figures.get("step", 0)),
                f"training loss, step {common:,}": _format_loss(
                    mean_loss(nearest) if nearest else math.nan, nearest["step"] if nearest else 0
                ),
                "validation loss, last": _format_pair(history.evaluations[-1:]),
                "validation loss, lowest": _format_pair([best] if best else []),
                "speed": _format_figure(figures, "perf/tokens_per_sec", "{:,.0f} tok/s".format),
                "": _format_figure(
                    figures, "perf/samples_per_sec", lambda rate: f"{units.rate(rate)} samples/s"
                ),
                "MFU": _format_figure(figures, "perf/mfu", "{:.1%}".format),
                "step time": _format_figure(figures, "time/total", "{:,.0f} ms".format),
                "peak memory": _format_figure(
                    figures, "memory/max_peak_gib", lambda gib: units.memory(gib * _GIB)
                ),
                "ranks": str(run.ranks or ""),
                "started": journal.format_time(run.started) if run.started else "",
                "last change": journal.format_time(run.updated) if run.updated else "",
            }
        )
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    return [row for row in rows if any(row[1:])]  # no MFU on a CPU, say


def list_differences(runs: tuple[RunSummary, RunSummary]) -> list[tuple[str, ...]]:
    """Return the options, inputs, versions and the commit that differ, with both values."""
    facts = [_read_facts(run.path) for run in runs]
    return [
        (name, *(_format_fact(run_facts.get(name)) for run_facts in facts))
        for name in {**facts[0], **facts[1]}
        if facts[0].get(name) != facts[1].get(name)
    ]


def _read_facts(root: Path) -> dict[str, Any]:
    """Return the options, inputs, versions and the commit of a run, by their names in the table."""
    content = run_records.read_config(Experiment(root.parent, root.name))
    settled = content.get("settled", {})
    facts = {
        f"--{name.replace('_', '-')}": settled.get(name, value)
        for name, value in content.get("options", {}).items()
        if name not in _UNIMPORTANT
    }
    inputs = content.get("identity", {}).get("inputs", {})
    versions = content.get("versions", {})
    for kind, values in (("input", inputs), ("version of", versions)):
        if isinstance(values, dict):
            facts |= {f"{kind} {name}": value for name, value in values.items()}
    return {**facts, "commit": content.get("git_commit")}


def _plot_losses(histories: list[LossHistory], width: int) -> list[str]:
    """Return the plot of both losses over the tokens or steps that both runs have done."""
    if not all(history.rows for history in histories):
        return ["", "no plot: one of the runs has no rows yet"]
    rows = [row for history in histories for row in history.rows]
    by_tokens = all("train/tokens_seen" in row for row in rows) and not _has_equal_steps(histories)
    axis = "train/tokens_seen" if by_tokens else "step"
    end = min(history.rows[-1][axis] for history in histories)
    curves = [[PlotPoint(row[axis], mean_loss(row)) for row in h.rows] for h in histories]
    unit = "tokens" if by_tokens else "step"
    labels = (f"{unit} 0", units.count(end) if by_tokens else f"{end:,}")
    head = f"training loss of A and B (* both), up to {labels[1]} {unit}s"
    plot = render_pair(curves, width, end, labels)
    return ["", head.replace("tokenss", "tokens"), *plot] if plot else []


def _has_equal_steps(histories: list[LossHistory]) -> bool:
    """Return whether both runs train on equally many tokens per step, up to padding."""
    sizes = [h.rows[-1]["train/tokens_seen"] / max(1, h.rows[-1]["step"]) for h in histories]
    return math.isclose(*sizes, rel_tol=0.02)


def _align_columns(rows: Iterable[tuple[str, ...]], width: int) -> list[str]:
    """Return the lines of a table with three columns, the last two equally wide."""
    cell = (width - _LABEL_WIDTH - 2) // 2
    return [
        f"{shorten_text(label, _LABEL_WIDTH):<{_LABEL_WIDTH}}  "
        f"{shorten_text(one_line(first), cell - 2):<{cell}}"
        f"{shorten_text(one_line(second), cell)}".rstrip()
        for label, first, second in rows
    ]


def _format_fact(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else one_line(value)


def _format_figure(figures: Row, key: str, show: Any) -> str:
    value = figures.get(key, math.nan)
    return show(value) if math.isfinite(value) else ""


def _format_loss(loss: float, step: int) -> str:
    return f"{loss:.4f} at step {step:,}" if step else ""


def _format_pair(pairs: list[tuple[int, float]]) -> str:
    return f"{pairs[0][1]:.4f} at step {pairs[0][0]:,}" if pairs else ""
