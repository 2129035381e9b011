"""Find the problems of a run in its files, for people who read its report."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lib.core.events import DESCRIPTIONS, PROBLEMS, Event
from lib.train.history import History

SHOWN = {*PROBLEMS, Event.START, Event.RESUME, Event.COMPLETE}  # events that a report lists
_JUMP = 2.0  # times the mean of the rows before, from which a loss is a jump
_STRAGGLER = 1.5  # times the median rank's time, on average
_WAITING = 0.05  # share of the step time
_FULL = 0.95  # share of the memory
_WORSE = 1.01  # times the lowest validation loss


class Problem(NamedTuple):
    """A problem in one or two sentences. events: numbers of the events that show it.

    chart: the key of a figure that shows it, empty if there is none.
    """

    text: str
    events: tuple[int, ...] = ()
    chart: str = ""


def find_problems(run: History) -> list[Problem]:
    """Return the problems of a run: those that its events report, then those of its figures."""
    return _read_events(run.events) + _read_figures(run)


def _read_events(events: list[dict[str, Any]]) -> list[Problem]:
    problems = []
    kinds = [kind for kind in Event if kind in PROBLEMS or kind == Event.RESUME]
    for kind in kinds:
        numbers = tuple(n for n, event in enumerate(events) if event.get("event") == kind)
        if not numbers:
            continue
        last = events[numbers[-1]]
        reason = f" The last reason: {last['reason']}." if last.get("reason") else ""
        times = f"{len(numbers)} times, last" if len(numbers) > 1 else "Once,"
        meaning = DESCRIPTIONS[kind].meaning.replace("`", "")
        problems.append(Problem(f"{times} at step {last['step']:,}: {meaning}{reason}", numbers))
    return problems


def _read_figures(run: History) -> list[Problem]:
    problems = []
    for key in ("train/loss", "train/grad_norm"):
        if (step := run.series[key].first_gap) is not None and run.series[key]:
            text = f"{key} was NaN or infinite, first at step {step:,}. Its curve has gaps there."
            problems.append(Problem(text, (), key))
    if jumps := _find_jumps(run):
        text = f"The loss rose to more than {_JUMP:g} times its recent mean, in {jumps} places."
        problems.append(Problem(text, (), "train/loss"))
    validation = run.series["eval/loss"]
    if validation.last.value > _WORSE * validation.least.value:
        value, step = validation.least
        text = (
            f"The validation loss was lowest at step {step:,}, {value:.4f}, and is "
            f"{validation.last.value:.4f} now. Stage 05 exports that step with --step best."
        )
        problems.append(Problem(text, (), "eval/loss"))
    data = run.series["time/data"].mean / run.series["time/total"].mean
    if data > _WAITING:
        text = f"The ranks waited for data {data:.0%} of the time."
        problems.append(Problem(text, (), "time/total"))
    if (ratio := run.series["perf/slowest_ratio"].mean) > _STRAGGLER:
        rank = run.last.get("perf/slowest_rank", "?")
        text = (
            f"The slowest rank took {ratio:.1f} times as long as the median rank for data and "
            f"optimizer; in the last row it is rank {rank}."
        )
        problems.append(Problem(text))
    share = run.series["memory/max_peak_gib"].most.value / run.series["memory/total_gib"].most.value
    if share > _FULL:
        text = f"The memory of a rank was {share:.0%} full."
        problems.append(Problem(text, (), "memory/max_peak_gib"))
    if retries := run.series["memory/alloc_retries"].most.value > 0:
        text = f"The allocator of a GPU had to return cached memory {retries:.0f} times."
        problems.append(Problem(text, (), "memory/max_peak_gib"))
    return problems


def _find_jumps(run: History) -> int:
    """Return the number of columns whose largest loss is far above the mean of those before."""
    series = run.series["train/loss"]
    means = series.column_means()
    columns = np.flatnonzero(np.isfinite(means))
    high = series.high[columns]
    before = np.array([means[columns][max(0, n - 8) : n].mean() for n in range(1, len(columns))])
    return int((high[1:] > _JUMP * before).sum()) if len(columns) > 1 else 0
