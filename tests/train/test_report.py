"""How fast a launch is, and when it ends: without the first step, with what comes between steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lib.core.paths import Experiment
from lib.train import meters, report
from lib.train.report import Report
from tests.train.test_plan import make

FIRST_S, STEP_S, SAVE_S = 60.0, 5.0, 95.0


def test_the_first_step_is_left_out_and_saves_are_not(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], []
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(report.log, "info", lines.append)
    plan = make(samples=10**6, max_steps=1000, no_progress=True)
    layout = SimpleNamespace(rank=0, ranks=1, device=torch.device("cpu"))
    state = SimpleNamespace(plan=plan, layout=layout, step=500,
                            model=SimpleNamespace(config=SimpleNamespace(model_type="llama")))
    (tmp_path / "exp").mkdir()
    told = Report(Experiment(tmp_path, "exp"), None, state, None, None, None)

    def step_done(seconds: float) -> None:
        clock[0] += seconds
        state.step += 1
        told.step_done()

    try:
        step_done(FIRST_S)
        assert told._speeds() == {}
        for _ in range(502, 521):
            step_done(STEP_S)
        assert told._speeds() == {"perf/run_tokens_per_sec": plan.tokens_per_step / STEP_S,
                                  "perf/eta_sec": 480 * STEP_S}
        assert lines == ["measured over 19 steps: 5 s per step, 6 tok/s; the 480 steps left take "
                         "40 min 00 s, with a checkpoint every 41 min 40 s"]
        clock[0] += SAVE_S
        assert told._speeds()["perf/eta_sec"] == 480 * 2 * STEP_S
        state.step = 1000
        assert "perf/eta_sec" not in told._speeds()
    finally:
        told._metrics.close()
