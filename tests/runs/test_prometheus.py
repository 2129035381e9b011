# covers: lib/runs/prometheus.py
"""metrics.prom, read by a strict parser of Prometheus' text format."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from threading import Event, Thread

import pytest

from lib.core.paths import Experiment
from lib.runs import prometheus
from lib.runs.figures import METRICS, STATE
from lib.runs.prometheus import PrometheusFile
from tests.conftest import run_stage
from tests.training import SMALL_RUN, metrics

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_VALUE = r'"(?:[^"\\\n]|\\[\\"n])*"'
_SAMPLE = re.compile(rf"({_NAME})\{{((?:{_NAME}={_VALUE},?)*)\}} (\S+)")
_LABEL = re.compile(rf"({_NAME})=({_VALUE})(?:,|$)")
_NUMBER = re.compile(r"NaN|[+-]Inf|[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
Labels = tuple[tuple[str, str], ...]


def parse_prometheus(text: str) -> dict[str, dict[Labels, float]]:
    """Return the samples by gauge and labels. Fails for everything that node_exporter refuses.

    https://prometheus.io/docs/instrumenting/exposition_formats/, without timestamps.
    """
    assert text.endswith("\n")
    gauges: dict[str, dict[Labels, float]] = {}
    current = ""
    typed = ""
    for line in text.removesuffix("\n").split("\n"):
        if comment := re.fullmatch(rf"# HELP ({_NAME}) ((?:[^\\\n]|\\[\\n])+)", line):
            current = comment[1]
            assert current not in gauges, f"{current} has two groups"
            gauges[current] = {}
        elif comment := re.fullmatch(rf"# TYPE ({_NAME}) gauge", line):
            typed = comment[1]
            assert typed == current and not gauges[current], line
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample and sample[1] == current == typed, line
            assert _NUMBER.fullmatch(sample[3]), line
            labels = tuple((key, json.loads(value)) for key, value in _LABEL.findall(sample[2]))
            assert len(dict(labels)) == len(labels) and labels not in gauges[current], line
            gauges[current][labels] = float(sample[3].replace("Inf", "inf"))
    assert all(gauges.values()), "a gauge without samples"
    return gauges


def read_gauges(experiment: Experiment) -> dict[str, float]:
    """Return the gauges of metrics.prom that have only the label `exp`, without their prefix."""
    gauges = parse_prometheus(experiment.prometheus.read_text())
    labels = (("exp", experiment.root.name),)
    return {
        name.removeprefix("llm_train_"): samples[labels]
        for name, samples in gauges.items()
        if labels in samples
    }


@pytest.fixture(autouse=True)
def write_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_EVERY_S", 0.0)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    run = Experiment(tmp_path, "exp")
    run.root.mkdir()
    return run


def test_every_figure_has_a_gauge_in_base_units() -> None:
    named = [figure for figure in [*METRICS.values(), *STATE.values()] if figure.prometheus]
    names = [figure.prometheus for figure in named]
    assert len(set(names)) == len(names)
    assert [key for key, figure in METRICS.items() if not figure.prometheus] == []
    assert not [name for name in names if not re.fullmatch(r"[a-z_]+", name)]
    assert not [name for name in names if name.endswith(("_total", "_ms", "_gib", "_count"))]
    for figure in METRICS.values():
        if "ms" in figure.unit or figure.unit in ("s", "UTC"):
            assert figure.prometheus.endswith("_seconds")
        if figure.unit == "GiB":
            assert figure.prometheus.endswith("_bytes")


def test_a_row_and_the_status_become_gauges(experiment: Experiment) -> None:
    file = PrometheusFile(experiment, 0)
    state = {"status": "running", "step": 10, "total_steps": 400, "checkpoints": [5, 10]}
    file.set_state(state)
    row = {
        "step": 12,
        "train/loss": 2.5,
        "train/learning_rate": 3e-05,
        "time/total": 250.0,
        "memory/peak_gib": 1.5,
        "perf/tflops": 2.0,
        "perf/unknown": 1.0,
    }
    file.set_row(row, 1e9)
    gauges = read_gauges(experiment)
    assert (gauges["step"], gauges["planned_steps"], gauges["checkpoint_step"]) == (12, 400, 10)
    assert gauges["learning_rate"] == 3e-05 and gauges["loss"] == 2.5
    assert gauges["step_seconds"] == 0.25 and gauges["row_timestamp_seconds"] == 1e9
    assert gauges["memory_peak_bytes"] == 1.5 * (1 << 30)
    assert gauges["device_flop_per_second"] == 2e12
    assert "unknown" not in experiment.prometheus.read_text()


@pytest.mark.parametrize("status", ["running", "complete", "preempted", "failed", "disk_full"])
def test_exactly_one_status_is_1(experiment: Experiment, status: str) -> None:
    PrometheusFile(experiment, 0).set_state({"status": status, "step": 3, "checkpoints": []})
    samples = parse_prometheus(experiment.prometheus.read_text())["llm_train_status"]
    assert len(samples) == 5
    assert [dict(labels)["status"] for labels, value in samples.items() if value] == [status]


def test_a_validation_stays_until_the_next_one_and_other_figures_do_not(
    experiment: Experiment,
) -> None:
    file = PrometheusFile(experiment, 0)
    file.set_row({"step": 1, "eval/loss": 3.0, "perf/eta_sec": 9.0}, 1.0)
    file.set_row({"step": 2}, 2.0)
    gauges = read_gauges(experiment)
    assert gauges["validation_loss"] == 3.0 and "remaining_seconds" not in gauges


def test_layers_and_datasets_become_labels(experiment: Experiment) -> None:
    file = PrometheusFile(experiment, 0)
    row = {"step": 1, "eval/loss": 2.0, "eval/loss/b": 3.0, "experts/layer_01/max_load": 1.5}
    file.set_row({**row, "eval/loss/a": 1.0, "experts/layer_00/max_load": 2.5}, 1.0)
    gauges = parse_prometheus(experiment.prometheus.read_text())
    assert gauges["llm_train_dataset_validation_loss"] == {
        (("exp", "exp"), ("dataset", "b")): 3.0,
        (("exp", "exp"), ("dataset", "a")): 1.0,
    }
    assert set(gauges["llm_train_experts_layer_max_load_ratio"]) == {
        (("exp", "exp"), ("layer", layer)) for layer in ("0", "1")
    }


@pytest.mark.parametrize("name", ['a "b" \\ c', "zwei Läufe", "tab", "\udcff"])
def test_odd_names_are_escaped(tmp_path: Path, name: str) -> None:
    experiment = Experiment(tmp_path, name)
    experiment.root.mkdir()
    file = PrometheusFile(experiment, 0)
    file.set_row({"step": 1, "train/loss": math.nan, "train/grad_norm": math.inf}, 1.0)
    gauges = parse_prometheus(experiment.prometheus.read_text())
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert math.isnan(gauges["llm_train_loss"][("exp", shown),])
    assert gauges["llm_train_gradient_norm"][("exp", shown),] == math.inf


def test_a_reader_never_sees_a_part_of_the_file(experiment: Experiment) -> None:
    file = PrometheusFile(experiment, 0)
    file.set_state({"status": "running", "step": 0, "checkpoints": []})
    ended = Event()

    def write_rows() -> None:
        for step in range(300):
            file.set_row({"step": step, "train/loss": 1 / (step + 1)}, 1.0)
        ended.set()

    writer = Thread(target=write_rows)
    writer.start()
    sizes = set()
    while not ended.is_set():
        gauges = read_gauges(experiment)
        sizes.add(len(gauges))
    writer.join()
    assert gauges and read_gauges(experiment)["step"] == 299 and max(sizes) <= 5


def test_a_full_disk_costs_one_warning(
    experiment: Experiment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.core.log._logger.propagate", True)
    file = PrometheusFile(experiment, 0)
    experiment.prometheus.mkdir()  # a rename onto a directory fails
    for step in range(3):
        file.set_row({"step": step}, 1.0)
    text = "metrics.prom cannot be written"
    # Other tests may leave a second handler, which collects the same record once more.
    assert len({id(record) for record in caplog.records if text in record.getMessage()}) == 1
    experiment.prometheus.rmdir()
    file.set_row({"step": 4}, 1.0)
    assert read_gauges(experiment)["step"] == 4


def test_rows_within_a_second_wait_for_a_later_write(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_EVERY_S", 3600.0)
    file = PrometheusFile(experiment, 0)
    for step in range(1, 4):
        file.set_row({"step": step, "train/loss": 1.0 / step}, 1.0)
    assert read_gauges(experiment)["step"] == 1
    file.set_state({"status": "complete", "step": 3, "checkpoints": []})
    gauges = read_gauges(experiment)
    assert gauges["step"] == 3 and gauges["loss"] == 1 / 3


def test_other_ranks_write_nothing(experiment: Experiment) -> None:
    PrometheusFile(experiment, 1).set_row({"step": 1}, 1.0)
    assert not experiment.prometheus.exists()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, 3])
@pytest.mark.slow
def test_a_run_leaves_its_last_row_and_its_status(project: Path, ranks: int) -> None:
    options = ("-e", "exp", *SMALL_RUN, "--max-steps", 4, "--global-batch-size", 6)
    result = run_stage(
        "04_train_fsdp.py", *options, "--log-style", "dict", cwd=project, ranks=ranks
    )
    experiment = Experiment(project / "outputs", "exp")
    gauges = read_gauges(experiment)
    row = metrics(project, "exp")[-1]
    assert gauges["step"] == gauges["planned_steps"] == gauges["checkpoint_step"] == 4
    assert gauges["loss"] == row["train/loss"]
    assert gauges["validation_loss"] == row["eval/loss"]
    assert gauges["samples_per_second"] == row["perf/samples_per_sec"]
    assert row["perf/samples_per_sec"] == pytest.approx(6 / (row["time/total"] / 1000))
    assert row["perf/tokens_per_sec"] == pytest.approx(row["perf/samples_per_sec"] * 32)
    assert "'samples/s': " in result.stdout
    samples = parse_prometheus(experiment.prometheus.read_text())["llm_train_status"]
    assert samples[("exp", "exp"), ("status", "complete")] == 1
