# covers: lib/planning/saving.py
"""The simulated share of useful time: against the closed form, with two tiers, at its limits."""

from __future__ import annotations

import pytest

from benchmarks.goodput import simulate_run
from lib.planning.saving import Saving, useful_share

HOUR = 3600.0


@pytest.mark.parametrize(
    ("saving", "mtbf", "restart"),
    [
        (Saving(600, 60), 3 * HOUR, 300.0),
        (Saving(600, 2, lag=100), 3 * HOUR, 300.0),
        (Saving(120, 0.5, lag=110), 1.8 * HOUR, 600.0),
        (Saving(3000, 300), 5000.0, 600.0),
        (Saving(3000, 300), 5000.0, 0.0),
    ],
    ids=str,
)
def test_simulated_failures_agree_with_the_closed_form(saving: Saving, mtbf: float, restart: float):
    run = simulate_run(saving, mtbf, restart, failures=6000)
    assert run.useful / run.total == pytest.approx(useful_share(saving, mtbf, restart), rel=0.02)
    assert run.total / run.failures == pytest.approx(mtbf, rel=0.05)


@pytest.mark.slow
def test_two_tiers_lie_between_their_limits():
    shared = Saving(1800, 2, lag=300)
    local = Saving(120, 0.2, lag=5)

    def share(survives: float) -> float:
        run = simulate_run(shared, 3 * HOUR, 300, 6000, local=local, survives=survives)
        return run.useful / run.total

    never = share(0.0)
    sometimes = share(0.5)
    always = share(1.0)
    alone, near = (useful_share(saving, 3 * HOUR, 300) for saving in (shared, local))
    assert never == pytest.approx(alone, rel=0.02)
    assert always == pytest.approx(near, rel=0.02)
    assert never + 0.02 < sometimes < always - 0.02


def test_a_save_waits_for_the_commit_of_the_one_before():
    run = simulate_run(Saving(10, 1, lag=500), HOUR, 0.0, 6000)
    assert run.stalled / run.total == pytest.approx(1 / 501, rel=0.1)


def test_failures_too_frequent_for_any_save_leave_nothing():
    assert simulate_run(Saving(HOUR, 1.0), 1.0, 0.0, 100).useful == 0.0
