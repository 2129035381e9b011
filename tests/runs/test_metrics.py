# covers: lib/runs/metrics.py, lib/runs/row_files.py, lib/runs/row_writer.py
# covers: lib/runs/journal.py, lib/runs/state_file.py, lib/core/append_only.py
"""metrics.jsonl, TensorBoard, wandb and loss.png, on disks and in packages that may fail."""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from lib.core import manifest, offline
from lib.core.append_only import AppendOnlyFile
from lib.core.paths import Experiment
from lib.runs import row_files
from lib.runs.journal import Journal
from lib.runs.metrics import Curve, Metrics
from lib.runs.run_records import read_state


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    run = Experiment(tmp_path, "exp")
    run.root.mkdir()
    return run


def write_rows(
    experiment: Experiment, begin: int, steps: range, rank: int = 0, **more: float
) -> None:
    sink = Metrics(experiment, rank, begin)
    for step in steps:
        sink.write({"step": step, "train/loss": 1 / (step + 3), **more})
    sink.close()


def steps_of(experiment: Experiment) -> list[int]:
    return [row["step"] for row in row_files.read_rows(experiment.metrics)]


def test_figures_are_written_without_rounding(experiment: Experiment) -> None:
    write_rows(experiment, 0, range(1, 4), **{"train/learning_rate": 1e-17 / 3})
    rows = row_files.read_rows(experiment.metrics)
    assert [row["train/loss"] for row in rows] == [1 / 4, 1 / 5, 1 / 6]
    assert rows[0]["train/learning_rate"] == 1e-17 / 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["time"]) for row in rows)


def test_a_row_is_on_disk_at_once(experiment: Experiment) -> None:
    sink = Metrics(experiment, 0, 0)
    sink.write({"step": 1})
    assert steps_of(experiment) == [1]
    sink.close()


def test_a_resume_drops_the_rows_of_repeated_steps_and_says_so(
    experiment: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_rows(experiment, 0, range(1, 10))
    assert not caplog.messages
    write_rows(experiment, 5, range(6, 8))
    assert steps_of(experiment) == [1, 2, 3, 4, 5, 6, 7]
    assert "up to step 9" in caplog.text and "after step 5" in caplog.text
    write_rows(experiment, 0, range(1, 2))
    assert steps_of(experiment) == [1]
    assert [path.name for path in experiment.root.iterdir() if path.name.startswith("metrics")] == [
        "metrics.jsonl"
    ]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 3, "train/lo',
        b'{"step": 3}\n{"st',
        b"\x00\x00\x00",
        b"12",
        b"null",
        b'"',
        b"[3]",
        b"{}",
        b"\xff\xfe",
    ],
)
def test_a_line_torn_by_a_crash_is_ignored(experiment: Experiment, torn: bytes) -> None:
    write_rows(experiment, 0, range(1, 3))
    with experiment.metrics.open("ab") as file:
        file.write(torn)
    assert steps_of(experiment)[:2] == [1, 2]
    write_rows(experiment, 2, range(3, 5))
    assert steps_of(experiment) == [1, 2, 3, 4]
    assert all(json.loads(line) for line in experiment.metrics.read_text().splitlines())


def test_a_missing_file_has_no_rows(experiment: Experiment) -> None:
    assert row_files.read_rows(experiment.metrics) == []


def test_a_loss_of_nan_is_kept(experiment: Experiment) -> None:
    write_rows(experiment, 0, range(1, 2), **{"eval/loss": math.nan})
    assert math.isnan(row_files.read_rows(experiment.metrics)[0]["eval/loss"])


def test_only_rank_0_writes(experiment: Experiment) -> None:
    write_rows(experiment, 0, range(1, 3), rank=1)
    assert list(experiment.root.iterdir()) == []


@pytest.fixture
def room(experiment: Experiment) -> Iterator[Callable[[int], None]]:
    """Return a function that limits the size of all files in bytes (-1: no limit)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_rows_on_a_full_disk_wait_and_one_warning_is_logged(
    experiment: Experiment, room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The disk takes a part of a row and then nothing. A rewind in between needs no space."""
    caplog.set_level(logging.INFO, "pipeline")
    sink = Metrics(experiment, 0, 0)
    sink.write({"step": 1, "train/loss": 1.0})
    room(experiment.metrics.stat().st_size + 7)
    for step in (2, 3, 4):
        sink.write({"step": step, "train/loss": 1.0})
    assert [json.loads(line)["step"] for line in experiment.metrics.open()] == [1]
    sink.rewind(2)
    sink.write({"step": 3, "train/loss": 3.0})
    room(-1)
    sink.write({"step": 4, "train/loss": 4.0})
    sink.close()
    rows = row_files.read_rows(experiment.metrics)
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 1), (2, 1), (3, 3), (4, 4)]
    messages = [text for text in caplog.messages if "metrics.jsonl" in text]
    assert len(messages) == 2 and "No space" in messages[0]
    assert "again" in messages[1]


def test_a_full_disk_overwrites_the_old_state(experiment: Experiment, monkeypatch) -> None:
    """The disk has no space for a new file. After the end, `running` is not written."""
    journal = Journal(experiment, 0)
    journal.write_state("running", step=1, note="longer than the one that comes")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "write_json", full)
    journal.write_state("disk_full", step=2)
    assert read_state(experiment.state).items() >= {"status": "disk_full", "step": 2}.items()
    journal.write_state("running", step=1)
    assert read_state(experiment.state)["status"] == "disk_full"


def test_tensorboard_and_wandb_may_fail(
    experiment: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    experiment.tensorboard.write_text("a file in the way")
    calls: list[int] = []

    def log_row(figures: dict, step: int) -> None:
        calls.append(step)
        raise RuntimeError("the service is gone")

    sink = Metrics(experiment, 0, 0)
    sink._run = SimpleNamespace(log=log_row, finish=lambda: 1 / 0)
    for step in (1, 2, 3):
        sink.write({"step": step, "train/loss": 1.0})
    sink.close()
    assert steps_of(experiment) == [1, 2, 3] and calls == [1]
    assert sorted(text.split(" cannot")[0] for text in caplog.messages) == [
        "TensorBoard's file",
        "wandb",
    ]


def test_wandb_stays_offline_and_may_be_missing(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[dict] = []
    rows: list[dict] = []
    run = SimpleNamespace(log=lambda figures, step: rows.append(figures), finish=lambda: None)

    def init(**options: object) -> SimpleNamespace:
        calls.append(options)
        return run

    def make_table(columns: list[str], data: list[list[object]]) -> list[dict[str, object]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    package = SimpleNamespace(init=init, Table=make_table)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for _ in range(2):
        sink = Metrics(experiment, 0, 0, wandb=True)
        sink.write({"step": 1, "train/loss": 1.0})
        sink.write_samples(1, {}, [("def", "greedy", " main")])
        sink.close()
        monkeypatch.setitem(sys.modules, "wandb", None)  # the second time it cannot be imported
    assert [options["mode"] for options in calls] == ["offline"] and len(rows) == 2
    sample = {"step": 1, "prompt": "def", "kind": "greedy", "text": " main"}
    assert rows[1] == {"samples": [sample]}
    assert offline.OFFLINE_ENVIRONMENT["WANDB_MODE"] == "offline"
    assert [text for text in caplog.messages if text.startswith("wandb cannot be used")]


def test_the_plot_has_few_points_with_the_right_means(tmp_path: Path) -> None:
    """A point that stands for many rows has their mean loss."""
    curve = Curve()
    rows = 100_000
    for step in range(1, rows + 1):
        curve.add(
            {
                "train/tokens_seen": step,
                "train/learning_rate": 1.0,
                "train/loss": step,
                "train/loss_mean": step,
                "eval/loss": 1.0,
            }
        )
    assert len(curve.held_out) <= 4000 and 2000 <= len(curve.points) <= 4000
    tolerance = rows // len(curve.points) + 1
    assert all(abs(point.mean_loss - point.tokens) <= tolerance for point in curve.points)
    assert curve.points[-1].tokens == rows
    thread = Thread(target=curve.draw, args=(tmp_path / "loss.png", "caption"))
    thread.start()
    thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_tensorboard_gets_the_figures_and_ignores_repeated_steps(
    experiment: Experiment,
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    write_rows(experiment, 0, range(1, 10))
    write_rows(experiment, 5, range(6, 8))
    events = accumulator(str(experiment.tensorboard))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars[0].value == pytest.approx(1 / 4)
    assert "step" not in events.Tags()["scalars"]


def test_a_record_of_any_size_is_written(tmp_path: Path) -> None:
    file = AppendOnlyFile(tmp_path / "records")
    file.write(b"x" * (17 << 20) + b"\n")
    file.write(b"short\n")
    file.close()
    assert [len(line) for line in (tmp_path / "records").read_bytes().splitlines()] == [17 << 20, 5]
