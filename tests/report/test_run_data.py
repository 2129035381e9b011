# covers: lib/report/run_data.py, lib/report/problems.py
"""A run's files become columns, and its problems are found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.core.paths import Experiment
from lib.report.problems import find_problems
from lib.report.run_data import RunData, Series, find_axis, read_samples
from lib.runs import row_files
from tests.report.runs import make_row, write_lines, write_run

ROWS = [make_row(step) for step in range(1, 101)]


def read_run(root: Path, rows: list[dict[str, Any]], columns: int = 10, **more: Any) -> RunData:
    """Write a run with these rows and read it."""
    experiment = Experiment(write_run(root, rows, **more).parent, root.name)
    return RunData(experiment, *find_axis([experiment]), columns)


def test_a_column_keeps_the_least_the_largest_and_the_mean() -> None:
    series = Series(3)
    assert not series and math.isnan(series.mean)
    steps = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    values = np.array([4.0, 2.0, np.nan, 9.0, np.inf])
    series.add(np.array([0, 0, 0, 2, 2]), steps, values)
    series.add(np.array([2]), np.array([6.0]), np.array([1.0]))
    assert series.low.tolist() == [2.0, np.inf, 1.0]
    assert series.high.tolist() == [4.0, -np.inf, 9.0]
    assert series.gaps.tolist() == [True, False, True] and series.first_gap == 3
    assert series.first == (4.0, 1) and series.last == (1.0, 6)
    assert series.least == (1.0, 6) and series.most == (9.0, 4)
    assert series.mean == 4.0 and series.column_means()[0] == 3.0


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 20])
def test_the_columns_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(row_files, "_CHUNK", chunk)
    rows = [dict(row) for row in ROWS]
    del rows[3]["train/loss"]
    rows[50]["eval/wiki/bits_per_byte"] = 1.5
    run = read_run(tmp_path / "exp", rows)
    loss = run.series["train/loss"]
    expected = [row["train/loss"] for row in rows if "train/loss" in row]
    assert loss.most.value == max(expected) and loss.last == (expected[-1], 100)
    assert loss.mean == pytest.approx(sum(expected) / 99)
    assert run.series["eval/wiki/bits_per_byte"].first == (1.5, 51)
    assert (run.first["step"], run.timed["step"], run.last["step"]) == (1, 10, 100)
    assert run.seconds() == 100 and run.seconds(rows[9]["time"]) == 90


def test_both_json_readers_give_the_same_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = read_run(tmp_path / "fast", ROWS)
    monkeypatch.setattr(row_files, "_load_json", json.loads)
    plain = read_run(tmp_path / "plain", ROWS)
    assert all(np.array_equal(fast.series[key].low, plain.series[key].low) for key in fast.series)


def test_the_axis_has_tokens_only_if_all_runs_have_them(tmp_path: Path) -> None:
    first = Experiment(write_run(tmp_path / "a", ROWS).parent, "a")
    old = [{"step": row["step"], "train/loss": 1.0} for row in ROWS[:30]]
    second = Experiment(write_run(tmp_path / "b", old).parent, "b")
    empty = Experiment(write_run(tmp_path / "c", []).parent, "c")
    assert find_axis([first, empty]) == ("train/tokens_seen", 102_400.0)
    assert find_axis([first, second]) == ("step", 100.0)
    assert find_axis([empty]) == ("train/tokens_seen", 1.0)


def test_samples_are_those_of_the_first_the_middle_and_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == ([], {})
    rows = [{"step": step, "prompt": "p", "kind": "drawn", "text": str(step)} for step in range(9)]
    write_lines(path, [*rows, {"step": 8}])
    with path.open("a") as file:
        file.write('{"step": 99, "text": "to')
    steps, texts = read_samples(path)
    assert steps == [0, 4, 8]
    assert texts == {"p (drawn)": {0: "0", 4: "4", 8: "8"}, "": {8: ""}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({60: {"train/loss": 20.0}}, "near step 61"),
        ({60: {"train/loss": math.nan}}, "first at step 61"),
        ({20: {"eval/loss": 2.0}, 80: {"eval/loss": 2.5}}, "at step 21, 2.0000"),
        ({n: {"time/data": 70.0} for n in range(100)}, "50% of the time"),
        ({n: {"perf/slowest_ratio": 3.0} for n in range(100)}, "3.0 times as long"),
        ({50: {"memory/max_peak_gib": 79.0}}, "99% full"),
        ({99: {"memory/alloc_retries": 4}}, "memory 4 times"),
    ],
)
def test_problems_of_the_figures_are_found(
    tmp_path: Path, changes: dict[int, dict[str, float]], text: str
) -> None:
    rows = [row | changes.get(number, {}) for number, row in enumerate(ROWS)]
    (problem,) = find_problems(read_run(tmp_path / "exp", rows, columns=100))
    assert text in problem.text


def test_events_are_problems_with_their_numbers(tmp_path: Path) -> None:
    events = [
        {"event": "save", "step": 5},
        {"event": "copy_failed", "step": 5, "reason": "no route"},
        {"event": "resume", "step": 6},
        {"event": "copy_failed", "step": 9, "reason": "a timeout"},
        {"event": "complete", "step": 10},
    ]
    problems = find_problems(read_run(tmp_path / "exp", ROWS, events=events))
    assert [problem.events for problem in problems] == [(3, 5)], "a resume is no problem"
    assert problems[0].text.startswith("2 times, last at step 9")
    assert problems[0].text.endswith("a timeout.")
