"""metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

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
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["time"]) for row in rows)


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
