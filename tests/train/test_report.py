# covers: lib/train/output/report.py, lib/train/output/meters.py
"""The speed of a launch, the status of a run that fails, and the plot in the summary."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lib.checkpoints.checkpointer import Saved
from lib.core.paths import Experiment
from lib.tokens.batches import BEGINNING
from lib.train.output import meters, report
from lib.train.output.report import Report
from tests.train.test_plan import make_plan

FIRST_S = 60.0
STEP_S = 5.0
SAVE_S = 95.0


def test_the_speed_of_a_launch_includes_saves_and_excludes_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    lines = []
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(report.log, "info", lines.append)
    plan = make_plan(samples=10**6, max_steps=1000, no_progress=True)
    layout = SimpleNamespace(rank=0, ranks=1, device=torch.device("cpu"))
    state = SimpleNamespace(
        plan=plan,
        layout=layout,
        step=500,
        model=SimpleNamespace(config=SimpleNamespace(model_type="llama")),
        unevaluated={},
    )
    (tmp_path / "exp").mkdir()
    reporter = Report(Experiment(tmp_path, "exp"), None, state, None, None, None)

    def end_step(seconds: float) -> None:
        clock[0] += seconds
        state.step += 1
        reporter.count_step()

    try:
        end_step(FIRST_S)
        assert reporter._speeds() == {}
        for _ in range(502, 521):
            end_step(STEP_S)
        assert reporter._speeds() == {
            "perf/run_tokens_per_sec": plan.tokens_per_step / STEP_S,
            "perf/eta_sec": 480 * STEP_S,
        }
        [line] = lines
        assert "19 steps: 5 s per step, 6 tok/s" in line
        assert "480 steps" in line and "40 min 00 s" in line and "41 min 40 s" in line
        clock[0] += SAVE_S
        assert reporter._speeds()["perf/eta_sec"] == 480 * 2 * STEP_S
        state.step = 1000
        assert "perf/eta_sec" not in reporter._speeds()
    finally:
        reporter._metrics.close()


def test_an_error_after_the_last_save_leaves_the_run_complete(tmp_path: Path) -> None:
    """The same holds for a stopped run. Before the last save an error fails the run."""
    for statuses, then in (
        (["running"], ["failed"]),
        (["running", "complete"], []),
        (["running", "preempted"], []),
    ):
        (root := tmp_path / "-".join(statuses)).mkdir()
        plan = make_plan(samples=10**6, max_steps=1000, no_progress=True)
        written = []
        layout = SimpleNamespace(rank=0, ranks=1, device=torch.device("cpu"))
        state = SimpleNamespace(
            plan=plan,
            layout=layout,
            step=1000,
            tokens=5,
            position=BEGINNING,
            model=SimpleNamespace(config=SimpleNamespace(model_type="llama")),
            unevaluated={},
        )
        journal = SimpleNamespace(
            write_state=lambda status, written=written, **_: written.append(status),
            add_event=lambda *_, **__: None,
        )
        estimate = SimpleNamespace(report=lambda: None, gib=None)
        stream = SimpleNamespace(epoch=lambda position: 0.5)
        with (
            pytest.raises(RuntimeError),
            Report(Experiment(root, "e"), journal, state, stream, None, estimate) as reporter,
        ):
            for status in statuses[1:]:
                reporter.note_state(status)
            raise RuntimeError("any error")
        assert written == statuses + then


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_summary_names_the_plot_only_if_it_was_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_installed: bool,
) -> None:
    (tmp_path / "exp").mkdir()
    experiment = Experiment(tmp_path, "exp")
    if not is_installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        experiment.plot.write_bytes(b"from an earlier launch, which had the package")
    plan = make_plan(samples=10**6, max_steps=1000, no_progress=True)
    state = SimpleNamespace(
        plan=plan,
        layout=SimpleNamespace(rank=0, ranks=1, device=torch.device("cpu")),
        step=1000,
        tokens=5,
        position=BEGINNING,
        model=SimpleNamespace(config=SimpleNamespace(model_type="llama")),
        unevaluated={},
    )
    journal = SimpleNamespace(write_state=lambda *_, **__: None, add_event=lambda *_, **__: None)
    stream = SimpleNamespace(epoch=lambda position: 0.5)
    peak = float(is_installed)  # 0 if the launch takes no step
    meters = SimpleNamespace(memory_peak=peak, memory_before=0.5)
    estimate = SimpleNamespace(describe_peak=lambda *_: "1 GiB", gib=None)
    reporter = Report(experiment, journal, state, stream, meters, estimate)
    row = {
        "step": 1000,
        "train/loss": 1.0,
        "train/loss_mean": 1.0,
        "train/tokens_seen": 5,
        "train/learning_rate": 0.1,
    }
    reporter._metrics.write(row)
    monkeypatch.setattr(logging.getLogger("pipeline"), "propagate", True)
    with caplog.at_level("INFO", logger="pipeline"):
        for _ in range(2):
            save: Future[Saved] = Future()
            save.set_result(Saved(SimpleNamespace(is_required=True), None, 1.0))
            reporter.follow_save(save)
        reporter._metrics.close()
        reporter.finish()
    messages = list(dict.fromkeys(caplog.messages))  # other tests may leave a second handler
    assert (str(experiment.plot) in messages[-1]) == is_installed, messages
    assert ("1 GiB" in " ".join(messages)) == bool(peak), messages
    missing = [text for text in messages if "`matplotlib` is not installed" in text]
    assert len(missing) == (not is_installed), "one warning, not one at each checkpoint"
