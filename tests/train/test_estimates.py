# covers: lib/train/estimates.py, lib/train/plan.py
"""Estimates before a run starts: time, checkpoints, tokens per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lib.train import batch_division, estimates, plan
from lib.train.estimates import Hardware, ModelCost
from lib.train.plan import Plan
from tests.train.test_plan import options

SEVEN_B = ModelCost(7_250_000_000, 4.4e10, 0.2e10, 87e9, scratch=False, validates=True)
H100 = Hardware(8, 989e12, "data sheet of the H100")
FORTY_GB = 40_000_000_000 // 4 // 1024  # samples of 1,024 tokens


def planned(
    ranks: int = 8,
    samples: int = FORTY_GB,
    keep: int = 3,
    **changes: Any,
) -> Plan:
    config = options(seq_length=1024, precision="bf16", ckpt_keep=keep, **changes)
    division = batch_division.divide_batch(config, 0, ranks)
    return Plan(
        config, {}, division, samples, plan.count_steps(config, samples, division.global_batch)
    )


def test_time_is_operations_over_a_usual_share_of_the_peak() -> None:
    text = estimates.describe_cost(planned(), SEVEN_B, H100)["time"]
    assert text.startswith("about 38 h 37 min, ") and "measured" in text
    assert "40 % of 989 TFLOP/s" in text and "1,024 tokens" in text
    small = replace(SEVEN_B, parameters=3_000_000)
    assert "time" not in estimates.describe_cost(planned(), small, H100)
    assert "measured" not in estimates.describe_cost(planned(max_steps=20), SEVEN_B, H100)["time"]


def test_no_time_is_estimated_on_a_cpu() -> None:
    cpu = Hardware(8, None)
    assert "time" not in estimates.describe_cost(planned(), SEVEN_B, cpu)
    assert estimates.estimate_forward_seconds(1000, SEVEN_B, cpu) is None
    assert estimates.suggest_shorter_bench(planned(bench=True), SEVEN_B, cpu) is None
    text = estimates.suggest_global_batch(planned(), SEVEN_B, cpu)
    assert text and "the time stays" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "2,442 of 87.0 GB, every 500 steps: 212.5 TB written in all, at most 435.0 GB at once "
            "in 5 (the newest 3, the best, the one being written)",
        ),
        ({"keep": 0}, "2,442 of 87.0 GB, every 500 steps, 212.5 TB in all"),
        ({"max_steps": 1100}, "3 of 87.0 GB, every 500 steps, 261.0 GB in all"),
        ({"max_steps": 100}, "1 of 87.0 GB"),
    ],
)
def test_the_checkpoints_of_a_run_are_counted(changes: dict[str, Any], text: str) -> None:
    assert estimates.describe_cost(planned(**changes), SEVEN_B, H100)["checkpoints"].endswith(text)


def test_a_small_batch_of_a_large_model_causes_a_warning() -> None:
    text = estimates.suggest_global_batch(planned(), SEVEN_B, H100)
    problem, published, now, instead = text.splitlines()
    assert problem.startswith("8,192 tokens") and "7.25B parameters" in problem
    assert "65.5K to 4.19M" in published
    assert now.endswith("1,220,703 steps, 2,442 checkpoints")
    assert "--global-batch-size 256 for 262,144" in instead
    assert "38,146 steps, 77 checkpoints" in instead and "38 h 37 min" in instead
    assert estimates.suggest_global_batch(planned(global_batch_size=256), SEVEN_B, H100) is None


def test_the_suggestion_contains_max_steps_if_that_was_typed() -> None:
    text = estimates.suggest_global_batch(planned(max_steps=1_000_000), SEVEN_B, H100)
    assert "--global-batch-size 256 --max-steps 31250 for 262,144" in text


@pytest.mark.parametrize(("parameters", "batch"), [(124e6, 512), (1.2e9, 1024), (7e9, 2048)])
def test_a_run_from_scratch_gets_a_larger_suggested_batch(parameters: float, batch: int) -> None:
    text = estimates.suggest_global_batch(
        planned(), replace(SEVEN_B, parameters=int(parameters), scratch=True), H100
    )
    assert f"--global-batch-size {batch} for" in text


def test_the_suggested_batch_can_be_divided() -> None:
    text = estimates.suggest_global_batch(planned(ranks=12, batch_size=7), SEVEN_B, H100)
    assert text is None or int(text.partition("batch-size ")[2].split()[0]) % 84 == 0
    assert (
        estimates.suggest_global_batch(planned(ranks=3, batch_size=5), SEVEN_B, H100)
        .partition("batch-size ")[2]
        .startswith("255 ")
    )


def test_too_many_tokens_per_step_cause_a_warning() -> None:
    text = estimates.suggest_global_batch(planned(global_batch_size=64 * 512), SEVEN_B, H100)
    assert text.startswith("33,554,432 tokens")
    assert "--global-batch-size 4096 for 4,194,304" in text


def test_a_bench_of_many_minutes_gets_a_smaller_batch() -> None:
    """A recipe for 8 GPUs has steps of 2M tokens, so 28 of them take a quarter of an hour."""
    changes = {"max_steps": 28, "global_batch_size": 2048, "batch_size": 2}
    text = estimates.suggest_shorter_bench(planned(**changes), SEVEN_B, H100)
    assert text and "13 min 36 s" in text and "5 min 00 s" in text
    assert "--global-batch-size 752" in text and "47 micro-batches instead of 128" in text
    shorter = planned(**{**changes, "global_batch_size": 752})
    assert shorter.division.accumulation == 47
    assert estimates.suggest_shorter_bench(shorter, SEVEN_B, H100) is None
    by_passes = planned(max_steps=28, batch_size=2, grad_accum_steps=128)
    text = estimates.suggest_shorter_bench(by_passes, SEVEN_B, H100)
    assert text and "--grad-accum-steps 47" in text
    one_pass = planned(max_steps=28, batch_size=4096)
    assert estimates.suggest_shorter_bench(one_pass, SEVEN_B, H100) is None


@pytest.mark.parametrize(
    ("parameters", "changes"), [(3e6, {}), (7e9, {"max_steps": 9_999}), (7e9, {"samples": 60_000})]
)
def test_small_models_and_short_runs_cause_no_warning(parameters: float, changes: dict) -> None:
    assert (
        estimates.suggest_global_batch(
            planned(**changes), replace(SEVEN_B, parameters=int(parameters)), H100
        )
        is None
    )
