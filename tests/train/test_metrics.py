"""metrics.jsonl, TensorBoard and the console line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lib.core import log
from lib.core.paths import Experiment
from lib.train import metrics
from lib.train.metrics import Metrics


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    made = Experiment(tmp_path, "exp")
    made.root.mkdir()
    return made


def write(experiment: Experiment, begin: int, steps: range, rank: int = 0, **more: float) -> None:
    sink = Metrics(experiment, rank, begin)
    for step in steps:
        sink.write({"step": step, "train/loss": 1 / (step + 3), **more})
    sink.close()


def steps_of(experiment: Experiment) -> list[int]:
    return [row["step"] for row in metrics.read(experiment.metrics)]


def test_figures_come_back_as_they_were(experiment: Experiment) -> None:
    write(experiment, 0, range(1, 4), **{"train/learning_rate": 1e-17 / 3})
    rows = metrics.read(experiment.metrics)
    assert [row["train/loss"] for row in rows] == [1 / 4, 1 / 5, 1 / 6]
    assert rows[0]["train/learning_rate"] == 1e-17 / 3


def test_a_line_is_there_as_soon_as_it_is_written(experiment: Experiment) -> None:
    sink = Metrics(experiment, 0, 0)
    sink.write({"step": 1})
    assert steps_of(experiment) == [1]
    sink.close()


def test_a_resume_drops_what_is_about_to_be_run_again(experiment: Experiment) -> None:
    write(experiment, 0, range(1, 10))
    write(experiment, 5, range(6, 8))
    assert steps_of(experiment) == [1, 2, 3, 4, 5, 6, 7]
    write(experiment, 0, range(1, 2))
    assert steps_of(experiment) == [1]
    assert [path.name for path in experiment.root.iterdir()
            if path.name.startswith("metrics")] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 3, "train/lo', b'{"step": 3}\n{"st', b"\x00\x00\x00",
                                  b"12", b"null", b'"', b"[3]", b"{}", b"\xff\xfe"])
def test_a_line_torn_by_a_crash_is_left_out(experiment: Experiment, torn: bytes) -> None:
    write(experiment, 0, range(1, 3))
    with experiment.metrics.open("ab") as file:
        file.write(torn)
    assert steps_of(experiment)[:2] == [1, 2]
    write(experiment, 2, range(3, 5))
    assert steps_of(experiment) == [1, 2, 3, 4]
    assert all(json.loads(line) for line in experiment.metrics.read_text().splitlines())


def test_nothing_logged_yet(experiment: Experiment) -> None:
    assert metrics.read(experiment.metrics) == []


def test_a_loss_that_is_no_number_is_kept(experiment: Experiment) -> None:
    write(experiment, 0, range(1, 2), **{"eval/loss": math.nan})
    assert math.isnan(metrics.read(experiment.metrics)[0]["eval/loss"])


def test_only_rank_0_writes(experiment: Experiment) -> None:
    write(experiment, 0, range(1, 3), rank=1)
    assert list(experiment.root.iterdir()) == []


def test_tensorboard_has_the_figures_and_forgets_the_steps_run_again(experiment: Experiment,
                                                                      ) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    write(experiment, 0, range(1, 10))
    write(experiment, 5, range(6, 8))
    events = accumulator(str(experiment.tensorboard))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars[0].value == pytest.approx(1 / 4)
    assert "step" not in events.Tags()["scalars"]


def test_the_console_line_is_rounded_and_keeps_its_shape(experiment: Experiment, capsys) -> None:
    log.setup()
    Metrics(experiment, 0, 0).console(
        {"step": 150, "train/loss": 1.7234567, "train/learning_rate": 3.3333333e-5,
         "perf/tokens_per_sec": 6404.4, "perf/mfu": None, "time/data": 7.88, "eval/loss": 2.0,
         "perf/slowest_rank": 3, "perf/slowest_ratio": 1.7},
        running_loss=1.7211111, left="2 h 5 min")
    line = capsys.readouterr().out.strip()
    assert line.startswith("[rank=0] {'global_step': 150, 'running_loss': 1.7211, ")
    assert "'tok/s': 6404" in line and "'time/data': 7.9" in line and "'lr': 3.333e-05" in line
    assert "'mfu': None" in line
    assert "'slowest_rank': 3" in line and line.endswith("'left': '2 h 5 min'}")
