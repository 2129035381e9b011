# covers: lib/planning/saving.py
"""The best interval between saves has the largest useful share of time, and the plan prints it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lib.planning import saving
from lib.planning.saving import Saving, best_interval, useful_share
from tests.conftest import run_stage

HOUR = 3600.0


@pytest.mark.parametrize("stall", [0.1, 5.0, 60.0, 900.0])
def test_the_best_interval_has_the_largest_useful_share(stall: float):
    mtbf = 2.78 * HOUR
    best = best_interval(stall, 0.0, mtbf)
    assert best == pytest.approx(math.sqrt(2 * stall * mtbf), rel=0.6 * math.sqrt(stall / mtbf))
    shares = [useful_share(Saving(best * times, stall), mtbf, 600.0) for times in (0.97, 1, 1.03)]
    assert shares[1] > max(shares[0], shares[2])


def test_a_background_save_starts_after_the_last_one_has_ended():
    assert best_interval(0.01, 500.0, HOUR) == 500.0


def test_failures_too_frequent_for_any_save_leave_no_useful_time():
    assert useful_share(Saving(HOUR, 1.0), 1.0, 0.0) == 0.0


def test_the_failure_rate_equals_the_published_one():
    """466 interruptions in 54 days on 16,384 GPUs are one every 2 hours and 47 minutes."""
    hours = saving.GPU_HOURS_PER_FAILURE / 16384
    assert hours == pytest.approx(54 * 24 / 466, rel=1e-3)


@pytest.mark.parametrize(("on", "every"), [(True, 20.0), (False, math.sqrt(2 * 480 * 2 * HOUR))])
def test_the_plan_names_the_best_interval(on: bool, every: float):
    """512 GPUs fail every 2 hours in all, and a checkpoint has 960 GB: 8 minutes at 2 GB/s."""
    sentence = saving.describe_saving(960 * 10**9, 512, 1024.0, 2.0, on, 4.0)
    steps = int(re.search(r"--ckpt-freq (\d+) at 4 s per step", sentence)[1])
    assert steps == (120 if on else pytest.approx(every / 4, rel=0.15))
    assert (
        "of 960.0 GB in 8 min 00 s at 2 GB/s" in sentence and "failure every 2 h 00 min" in sentence
    )


@pytest.mark.slow
def test_a_dry_run_prints_the_best_interval(project: Path):
    before = sorted(project.rglob("*"))
    command = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "--dry-run")
    numbers = ("--plan-mtbf-hours", 10, "--plan-write-gbps", 0.001, "--plan-step-seconds", 0.5)
    (project / "run.yaml").write_text("plan_gpus: '8'\n")
    done = run_stage(*command, *numbers, "--config", "run.yaml", cwd=project)
    assert re.search(
        r"on 8 GPUs:\n(.*\n)*  best interval +a save every .*--ckpt-freq \d+ at 0.5 s "
        r"per step is best with a failure every 1 h 15 min.*at 0.001 GB/s",
        done.stdout,
    )
    (project / "run.yaml").unlink()
    assert sorted(project.rglob("*")) == before
