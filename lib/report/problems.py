"""Find the problems of a run in its files, for people who read its report."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lib.core import units
from lib.report.run_data import RunData
from lib.runs.events import DESCRIPTIONS, PROBLEMS, Event

SHOWN = {*PROBLEMS, Event.START, Event.RESUME, Event.COMPLETE}  # events that a report lists
_LOSS = "train/loss_mean"
_MEMORY = "memory/max_peak_gib"
# Figures from which a report lists a problem.
_WINDOW = 8  # columns before a loss, whose mean the loss is compared with
_JUMP = 2.0  # a jump of the loss, as a multiple of that mean
_STRAGGLER = 1.5  # mean time of the slowest rank, as a multiple of the median rank's time
_WAITING = 0.05  # time spent waiting for data, as a share of the step time
_FULL = 0.95  # peak memory, as a share of the GPU's memory
_WORSE = 1.01  # last validation loss, as a multiple of the lowest one


class Problem(NamedTuple):
    """Describes a problem of a run.

    text: one or two sentences. events: numbers of the events that show the problem, from 1. chart:
    the key of the chart that shows it, empty if there is none.
    """

    text: str
    events: tuple[int, ...] = ()
    chart: str = ""


def find_problems(run: RunData) -> list[Problem]:
    """Return the problems of a run: first from its events, then from its figures."""
    return _read_events(run.events) + _read_figures(run)


def _read_events(events: list[dict[str, Any]]) -> list[Problem]:
    problems = []
    for kind in (kind for kind in Event if kind in PROBLEMS):
        numbers = tuple(n for n, event in enumerate(events, 1) if event.get("event") == kind)
        if not numbers:
            continue
        last = events[numbers[-1] - 1]
        reason = f" The last reason: {last['reason']}." if last.get("reason") else ""
        times = f"{len(numbers)} times, last" if len(numbers) > 1 else "Once,"
        meaning = DESCRIPTIONS[kind].meaning.replace("`", "")
        problems.append(Problem(f"{times} at step {last['step']:,}: {meaning}{reason}", numbers))
    return problems


def _read_figures(run: RunData) -> list[Problem]:
    series = run.series
    problems = []
    for key, chart in (("train/loss", _LOSS), ("train/grad_norm", "train/grad_norm")):
        if (step := series[key].first_gap) is not None and series[key]:
            text = f"{key} was NaN or infinite, first at step {step:,}. Its curve has gaps there."
            problems.append(Problem(text, (), chart))
    if steps := _find_jumps(run):
        text = (
            f"The loss of a step rose to more than {_JUMP:g} times its recent mean, near step "
            f"{units.first_of(steps)}."
        )
        problems.append(Problem(text, (), _LOSS))
    last = series["eval/loss"].last.value
    lowest, step = series["eval/loss"].least
    if last > _WORSE * lowest:
        text = (
            f"The validation loss was lowest at step {step:,}, {lowest:.4f}, and is {last:.4f} "
            "now. Stage 05 exports that step with --step best."
        )
        problems.append(Problem(text, (), _LOSS))
    data = series["time/data"].mean
    total = series["time/total"].mean
    if data > _WAITING * total > 0:
        text = f"The ranks waited for data {data / total:.0%} of the time."
        problems.append(Problem(text, (), "time/total"))
    if (ratio := series["perf/slowest_ratio"].mean) > _STRAGGLER:
        text = (
            f"The slowest rank took {ratio:.1f} times as long as the median rank for data and "
            f"optimizer; in the last row it is rank {run.last.get('perf/slowest_rank', '?')}."
        )
        problems.append(Problem(text))
    peak = series[_MEMORY].most.value
    size = series["memory/total_gib"].most.value
    if peak > _FULL * size > 0:
        problems.append(Problem(f"The memory of a rank was {peak / size:.0%} full.", (), _MEMORY))
    if (retries := series["memory/alloc_retries"].most.value) > 0:
        text = f"The allocator of a GPU had to return cached memory {retries:.0f} times."
        problems.append(Problem(text, (), _MEMORY))
    return problems


def _find_jumps(run: RunData) -> list[int]:
    """Return the steps near which the loss is far above the mean of earlier steps."""
    means = run.series["train/loss"].column_means()
    columns = np.flatnonzero(np.isfinite(means))
    steps = []
    for number, column in enumerate(columns[1:], 1):
        before = means[columns[max(0, number - _WINDOW) : number]].mean()
        if run.series["train/loss"].high[column] > _JUMP * before > 0:
            steps.append(int(run.series["step"].high[column]))
    return steps
