"""Read the files of a run in one pass, in the columns of its charts instead of rows."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.core.errors import one_line
from lib.core.paths import Experiment
from lib.pages.series import LARGEST, Numbers, Series
from lib.runs import row_files, run_records
from lib.runs.growing_files import JsonLines

TOKENS = "train/tokens_seen"
# Keys of most rows. The keys of evaluations vary, so the rows are searched for them.
KEYS = f"""step {TOKENS} train/loss train/loss_mean train/grad_norm train/learning_rate
perf/tokens_per_sec perf/mfu perf/slowest_ratio time/data time/forward time/backward time/update
time/total memory/current_gib memory/window_peak_gib memory/max_peak_gib memory/total_gib
memory/alloc_retries""".split()
_MOST_KEYS = 200  # keys to read, which bounds the memory for a hostile file
_TAIL = 256 << 10  # bytes that contain the last row
_STEADY = 10  # step from which the remaining time is well estimated


class RunData:
    """Contains the files of a run.

    axis: key of the horizontal axis. end: the largest value on the axis. series: values by key.
    first, last: the first and the last row. timed: the first row with a good estimate of the
    remaining time. Each of these rows is empty if there is none.
    """

    def __init__(self, experiment: Experiment, axis: str, end: float, columns: int) -> None:
        self.experiment = experiment
        self.name = one_line(experiment.root.absolute().name)
        self.state = run_records.read_state(experiment.state)
        self.config = run_records.read_config(experiment)
        self.events = JsonLines(experiment.events).update()
        self.series: defaultdict[str, Series] = defaultdict(lambda: Series(columns))
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.timed: dict[str, Any] = {}
        self._axis = axis
        self._scale = columns / end
        self._columns = columns
        for chunk in row_files.read_chunks(experiment.metrics):
            self._add_rows(chunk)

    def seconds(self, since: str = "") -> float:
        """Return the seconds from `since` to the last sign of life of the run.

        since: a time in the format of events.jsonl (default: the first sign of life).
        """
        times = [str(row.get("time", "")) for row in (*self.events, self.first, self.last) if row]
        seconds = [second for text in times if (second := run_records.parse_time(text))]
        began = run_records.parse_time(since) or min(seconds, default=0.0)
        return max(seconds, default=began) - began

    def _add_rows(self, rows: list[dict[str, Any]]) -> None:
        self.first = self.first or rows[0]
        self.last = rows[-1]
        if not self.timed:
            later = (row for row in rows if row["step"] >= _STEADY and "perf/eta_sec" in row)
            self.timed = next(later, {})
        keys = set[str]().union(*rows)
        self._add([key for key in KEYS if key in keys], rows)
        for key in sorted(key for key in keys if key.startswith("eval/")):
            if key in self.series or len(self.series) < _MOST_KEYS:
                self._add([key], [row for row in rows if key in row])

    def _add(self, keys: Sequence[str], rows: list[dict[str, Any]]) -> None:
        """Add the values of keys."""
        get = operator.itemgetter("step", self._axis, *keys)
        try:
            table = _make_table([get(row) for row in rows])
        except KeyError:  # a row lacks a key; this is slower
            table = _make_table(
                [[row.get(key) for key in ("step", self._axis, *keys)] for row in rows]
            )
        places = np.nan_to_num(table[:, 1] * self._scale, posinf=0)
        columns = np.clip(places, 0, self._columns - 1).astype(int)
        for number, key in enumerate(keys, 2):
            self.series[key].add(columns, table[:, 0], table[:, number])


def find_axis(experiments: Sequence[Experiment]) -> tuple[str, float]:
    """Return the key of the horizontal axis and its largest value: tokens if all runs have them."""
    tails = [row_files.read_tail(experiment.metrics, _TAIL) for experiment in experiments]
    last = [tail[-1] for tail in tails if tail]
    axis = TOKENS if all(TOKENS in row for row in last) else "step"
    ends = np.nan_to_num(_make_table([[row[axis]] for row in last]), posinf=0)
    return axis, max(1.0, *map(float, ends.ravel()), 0.0)


def read_runs(
    experiments: Sequence[Experiment], axis: str, end: float, columns: int
) -> list[RunData]:
    """Return the history of each run. If two runs have the same name, they get their paths."""
    runs = [RunData(experiment, axis, end, columns) for experiment in experiments]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = one_line(run.experiment.root)
    return runs


def read_samples(path: Path) -> tuple[list[int], dict[str, dict[int, str]]]:
    """Return the texts in samples.jsonl at the first, the middle and the last step.

    Returns these steps, and the texts by prompt (with the kind of the sample) and step.
    """
    all_steps = sorted({row["step"] for chunk in row_files.read_chunks(path) for row in chunk})
    middle = all_steps[len(all_steps) // 2 :][:1]
    steps = sorted({*all_steps[:1], *middle, *all_steps[-1:]})
    texts: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for row in (row for chunk in row_files.read_chunks(path) for row in chunk):
        if row["step"] in steps:
            kind = f" ({row['kind']})" if row.get("kind") else ""
            texts[f"{row.get('prompt', '')}{kind}"][row["step"]] = str(row.get("text", ""))
    return steps, dict(texts)


def _make_table(rows: Sequence[Sequence[Any]]) -> Numbers:
    """Return numbers as a table; values that are no numbers become NaN."""
    try:
        return np.array(rows, dtype=float)
    except (ValueError, TypeError, OverflowError):
        return np.array([[read_number(value) for value in row] for row in rows])


def read_number(value: object, most: float = LARGEST) -> float:
    """Return a number below `most` from a file, and NaN for anything else."""
    is_number = isinstance(value, (int, float)) and abs(value) < most
    return float(value) if is_number else np.nan  # type: ignore[arg-type]
