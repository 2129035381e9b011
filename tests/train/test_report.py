"""How fast a launch is, and when it ends: without the first step, with what comes between steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.core.paths import Experiment
from lib.train import report, timers
from lib.train.report import Report
from tests.train.test_plan import make

FIRST_S, STEP_S, SAVE_S = 60.0, 5.0, 95.0


def test_the_first_step_is_left_out_and_saves_are_not(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], []
    monkeypatch.setattr(timers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(report.log, "info", lines.append)
    plan = make(samples=10**6, max_steps=1000, no_progress=True)
    (tmp_path / "exp").mkdir()
    told = Report(plan.config, Experiment(tmp_path, "exp"), plan, rank=0, step=500, caption="")
    try:
        clock[0] += FIRST_S
        told.step_done(501)
        assert told.speeds(501) == {}
        for step in range(502, 521):
            clock[0] += STEP_S
            told.step_done(step)
        assert told.speeds(520) == {"perf/run_tokens_per_sec": plan.tokens_per_step / STEP_S,
                                    "perf/eta_sec": 480 * STEP_S}
        assert lines == ["measured over 19 steps: 5 s per step, 6 tok/s; the 480 steps left take "
                         "40 min 00 s, with a checkpoint every 41 min 40 s"]
        clock[0] += SAVE_S
        assert told.speeds(520)["perf/eta_sec"] == 480 * 2 * STEP_S
        assert "perf/eta_sec" not in told.speeds(1000)
    finally:
        told.close()
