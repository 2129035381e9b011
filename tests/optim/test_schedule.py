# covers: lib/optim/schedule.py
"""The learning rate follows its schedule from first to last step, even if more steps are added."""

from __future__ import annotations

import argparse
import itertools
import math

import pytest

from lib.optim import schedule
from lib.optim.schedule import KINDS, Schedule

PEAK = 1e-3
MINIMUM = 1e-4


def rates(kind: str, warmup: int = 10, total: int = 110) -> list[float]:
    curve = Schedule(kind, PEAK, MINIMUM, warmup, total)
    return [curve.lr(step) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_a_straight_line_that_starts_above_zero(kind: str) -> None:
    assert rates(kind)[:10] == pytest.approx([PEAK * n / 10 for n in range(1, 11)])
    assert rates(kind, warmup=0)[0] == PEAK


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_warm_up_the_rate_never_rises(kind: str) -> None:
    curve = rates(kind)[10:]
    assert curve[0] == PEAK
    assert all(later <= earlier for earlier, later in itertools.pairwise(curve))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 2), (0, 100), (10, 110), (98, 100)])
def test_the_last_step_has_the_minimum(kind: str, warmup: int, total: int) -> None:
    last = rates(kind, warmup, total)[-1]
    assert last == pytest.approx(PEAK if kind == "constant" else MINIMUM)


def test_cosine_decays_along_half_a_cosine() -> None:
    curve = rates("cosine", warmup=0, total=101)
    for step, rate in enumerate(curve):
        assert rate == pytest.approx(
            MINIMUM + (PEAK - MINIMUM) * (1 + math.cos(math.pi * step / 100)) / 2
        )
    assert curve[50] == pytest.approx((PEAK + MINIMUM) / 2)


def test_linear_decays_along_a_straight_line() -> None:
    curve = rates("linear", warmup=0, total=101)
    falls = [earlier - later for earlier, later in itertools.pairwise(curve)]
    assert falls == pytest.approx([(PEAK - MINIMUM) / 100] * 100)


def test_warm_up_stable_decay_goes_down_in_the_last_fifth() -> None:
    curve = rates("wsd", warmup=0, total=101)
    assert curve[:81] == pytest.approx([PEAK] * 81)
    assert curve[90] == pytest.approx((PEAK + MINIMUM) / 2)


@pytest.mark.parametrize(
    ("kind", "middle"), [("wsd:0.4", 0.5), ("wsd:0.4:cosine", 0.5), ("wsd:0.4:sqrt", 1 - 0.5**0.5)]
)
def test_the_decay_has_a_share_and_a_shape(kind: str, middle: float) -> None:
    curve = rates(kind, warmup=0, total=101)
    assert curve[:61] == pytest.approx([PEAK] * 61) and curve[61] < PEAK
    assert curve[80] == pytest.approx(MINIMUM + middle * (PEAK - MINIMUM))
    assert curve[-1] == pytest.approx(MINIMUM)
    assert all(later < earlier for earlier, later in itertools.pairwise(curve[60:]))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("wsd:0.20", "wsd"),
        ("wsd:.2:linear", "wsd"),
        ("wsd::sqrt", "wsd:0.2:sqrt"),
        ("wsd:1", "wsd:1"),
    ],
)
def test_defaults_are_left_out_of_a_kind(text: str, kind: str) -> None:
    assert schedule.parse_kind(text) == kind


@pytest.mark.parametrize(
    "text",
    ["", "wsd:0", "wsd:1.1", "wsd:nan", "wsd:x", "wsd:0.2:step", "wsd:0.2:sqrt:1", "cosine:0.2"],
)
def test_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected one of cosine"):
        schedule.parse_kind(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_stays_constant_after_the_last_step(kind: str) -> None:
    curve = Schedule(kind, PEAK, MINIMUM, 10, 110)
    assert curve.lr(500) == pytest.approx(curve.lr(109))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (5, 3), (5, 5), (5, 6)])
def test_very_short_runs_have_valid_rates(kind: str, warmup: int, total: int) -> None:
    assert all(0 < rate <= PEAK for rate in rates(kind, warmup, total))


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_raised_total_stretches_the_schedule(kind: str) -> None:
    short = rates(kind, 10, 110)
    long = rates(kind, 10, 210)
    assert all(new >= old for old, new in zip(short, long, strict=False))
    assert long[109] > short[109] and long[-1] == pytest.approx(MINIMUM)
    assert long[10:][2 * 25] == pytest.approx(short[10:][25], rel=0.02)


@pytest.mark.parametrize(
    ("total", "steps"), [(1, 0), (19, 0), (20, 1), (1000, 50), (20_000, 1000), (10**6, 1000)]
)
def test_the_default_warm_up_is_a_share_of_the_steps(total: int, steps: int) -> None:
    assert schedule.default_warmup(total) == steps
