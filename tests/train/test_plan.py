# covers: lib/train/plan.py, lib/train/batch_division.py, lib/train/previous_run.py
"""The plan of a run: steps, division of the batch, and the identity that a resume must share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib.core import paths
from lib.core.errors import UsageError
from lib.planning.options import PlannedGpus, parse_planned_gpus
from lib.tokens.order import Division
from lib.train import batch_division, checks, plan, previous_run
from lib.train.config import Config
from lib.train.plan import Plan


def options(**changes: Any) -> Config:
    return Config(
        **{
            "experiment_name": "exp",
            "lr": 1e-3,
            "min_lr": 1e-4,
            "seq_length": 8,
            "precision": "fp32",
        }
        | changes
    )


def make_plan(samples: int = 103, **changes: Any) -> Plan:
    """Return a plan of sequences of 8 tokens on one rank."""
    config = options(**{"batch_size": 4} | changes)
    division = batch_division.divide_batch(config, 0, 1)
    return Plan(
        config,
        {"model": "m", "dataset": "d", "tokenizer": "t"},
        division,
        samples,
        plan.count_steps(config, samples, division.global_batch),
    )


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 1, (1, 1, 1)),
        ({"batch_size": 4}, 2, (4, 1, 8)),
        ({"batch_size": 4, "grad_accum_steps": 3}, 2, (4, 3, 24)),
        ({"global_batch_size": 24}, 1, (1, 24, 24)),
        ({"batch_size": 4, "global_batch_size": 24}, 2, (4, 3, 24)),
        ({"batch_size": 4, "global_batch_size": 24}, 6, (4, 1, 24)),
    ],
)
def test_a_global_batch_is_divided_into_micro_batches(
    changes: dict, ranks: int, expected: tuple[int, int, int]
) -> None:
    division = batch_division.divide_batch(options(**changes), ranks - 1, ranks)
    assert (division.micro_batch, division.accumulation, division.global_batch) == expected
    assert (division.dp_rank, division.dp_size) == (ranks - 1, ranks)


@pytest.mark.parametrize(("batch", "ranks"), [(5, 1), (4, 4), (1, 7), (32, 1)])
def test_a_global_batch_that_cannot_be_divided_is_refused(batch: int, ranks: int) -> None:
    with pytest.raises(UsageError, match="cannot be divided") as caught:
        batch_division.divide_batch(options(batch_size=batch, global_batch_size=24), 0, ranks)
    assert f"a multiple of {batch * ranks} = {batch} per process" in caught.value.expected
    assert f"{ranks} ranks" in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 10),  # neither: one epoch, its last 3 samples left out
        ({"num_epochs": 3}, 30),  # 309 samples: epochs are one stream
        ({"num_epochs": 4}, 41),  # 412 samples: 4 × 3 left over make one more
        ({"max_steps": 7}, 7),
        ({"max_steps": 1000}, 1000),  # only steps: epochs without end
        ({"num_epochs": 1, "max_steps": 1000}, 10),  # whichever comes first
        ({"num_epochs": 3, "max_steps": 5}, 5),
        ({"steps_per_epoch": 25}, 25),  # an epoch is so many steps, whatever the data
        ({"steps_per_epoch": 25, "num_epochs": 3}, 75),
        ({"steps_per_epoch": 25, "num_epochs": 3, "max_steps": 70}, 70),
        ({"steps_per_epoch": 25, "max_steps": 70}, 70),
    ],
)
def test_steps_and_epochs_limit_a_run(changes: dict, steps: int) -> None:
    assert plan.count_steps(options(**changes), samples=103, global_batch=10) == steps


@pytest.mark.parametrize(
    ("changes", "samples"),
    [({}, 0), ({}, 9), ({"num_epochs": 1, "max_steps": 5}, 9), ({"max_steps": 5}, 0)],
)
def test_too_little_data_for_a_step_is_refused(changes: dict, samples: int) -> None:
    with pytest.raises(UsageError, match="too small") as caught:
        plan.count_steps(options(**changes), samples, global_batch=10)
    assert f"{samples} samples in an epoch, 10 in a step" in caught.value.found


def test_little_data_is_enough_if_epochs_repeat() -> None:
    assert plan.count_steps(options(max_steps=5), samples=1, global_batch=10) == 5
    assert plan.count_steps(options(num_epochs=20), samples=1, global_batch=10) == 2


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"global_batch_size": 8, "grad_accum_steps": 2}, "not both"),
        ({"min_lr": 1e-2}, "--min-lr 0.01 is above"),
        ({"beta1": 1.0}, "--beta1 must be below 1"),
        ({"beta2": 1.5}, "--beta2 must be below 1"),
    ],
)
def test_contradictory_options_are_refused(changes: dict, expected_text: str) -> None:
    with pytest.raises(UsageError, match=expected_text):
        checks.require_consistent(options(**changes), has_begun=False)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(UsageError, match="3 problems") as caught:
        checks.require_consistent(options(min_lr=1.0, beta1=1.0, beta2=1.0), has_begun=False)
    assert "--beta2" in caught.value.problem
    checks.require_consistent(options(), has_begun=False)


def test_derived_numbers_come_with_their_derivation() -> None:
    rows = make_plan(grad_accum_steps=3, num_epochs=2).describe()
    assert rows["tokens/step"] == "96 = 4 per process × 8 tokens × 3 accumulation × 1 rank"
    assert rows["epoch"] == "1 epoch = 103 samples = 8.6 steps"
    assert rows["steps"] == "17 (1.98 epochs, 1,632 tokens)"
    assert rows["left out"] == "2 samples at the end, too few for a step"
    assert rows["learning rate"] == "cosine, 0.001 without warm-up, then to 0.0001"


def test_samples_left_out_are_reported_if_there_are_any() -> None:
    assert make_plan().describe()["left out"].startswith("3 samples")  # one epoch, not asked for
    assert "left out" not in make_plan(samples=104).describe()
    assert "left out" not in make_plan(max_steps=3).describe()
    assert "left out" not in make_plan(max_steps=3, num_epochs=1).describe()


def test_a_constant_rate_does_not_go_down() -> None:
    assert (
        make_plan(lr_scheduler="constant").describe()["learning rate"]
        == "constant, 1 step up to 0.001"
    )


def test_the_schedule_follows_the_options() -> None:
    schedule = make_plan(num_epochs=40, lr_scheduler="linear").schedule
    assert (schedule.kind, schedule.peak, schedule.minimum) == ("linear", 1e-3, 1e-4)
    assert (schedule.total, schedule.warmup) == (1030, 51)
    assert make_plan(warmup_steps=0).schedule.warmup == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"log_freq": 1},
        {"ckpt_freq": 7},
        {"num_epochs": 9},
        {"max_steps": 99},
        {"batch_size": 2, "grad_accum_steps": 2},
        {"batch_size": 1, "global_batch_size": 4},
        {"experiment_name": "moved"},
    ],
)
def test_a_resume_may_change_these_options(changes: dict) -> None:
    previous_run.require_same_run(
        make_plan().identity(), make_plan(**changes).identity(), Path("outputs/exp")
    )


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"seed": 1}, "--seed: 0 there, 1 now"),
        ({"lr": 2e-3}, "--lr: 0.001 there, 0.002 now"),
        ({"min_lr": 0.0}, "--min-lr: 0.0001 there, 0.0 now"),
        ({"warmup_steps": 3}, "--warmup-steps: not given there, 3 now"),
        ({"lr_scheduler": "wsd"}, "--lr-scheduler: cosine there, wsd now"),
        ({"weight_decay": 0.0}, "--weight-decay: 0.1 there, 0.0 now"),
        ({"beta2": 0.99}, "--beta2: 0.95 there, 0.99 now"),
        ({"grad_clip": 0.0}, "--grad-clip: 1.0 there, 0.0 now"),
        ({"batch_size": 8}, "--global-batch-size: 4 there, 8 now"),
    ],
)
def test_a_resume_must_share_these_options(changes: dict, expected_text: str) -> None:
    with pytest.raises(UsageError, match="other settings") as caught:
        previous_run.require_same_run(
            make_plan().identity(), make_plan(**changes).identity(), Path("outputs/exp")
        )
    assert caught.value.found == expected_text


def test_inputs_length_and_precision_must_be_the_same_and_all_are_named() -> None:
    before = make_plan()
    now = replace(
        before,
        inputs={**before.inputs, "dataset": "other"},
        config=replace(before.config, seq_length=16, precision="bf16"),
    )
    with pytest.raises(UsageError) as caught:
        previous_run.require_same_run(before.identity(), now.identity(), Path("outputs/exp"))
    assert caught.value.found.splitlines() == [
        "dataset: d there, other now",
        "--precision: fp32 there, bf16 now",
        "--seq-length: 8 there, 16 now",
    ]


def test_a_division_does_not_change_the_identity() -> None:
    before = make_plan()
    now = replace(before, division=Division(1, 2, 0, 2))
    assert now.identity() == before.identity()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("llama-8b_run.2", True),
        ("größe ü", True),
        ("a/b", False),
        ("..", False),
        ("", False),
        ("-x", False),
        ("a\nb", False),
        ("x" * 201, False),
    ],
)
def test_invalid_names_of_experiments_are_refused(text: str, good: bool) -> None:
    assert paths.is_name(text) is good


def test_another_optimizer_cannot_resume_even_with_changes() -> None:
    before = make_plan().identity()
    now = make_plan(optimizer="adamw8bit").identity()
    where = Path("o/exp")
    with pytest.raises(UsageError, match="started with other settings"):
        previous_run.require_same_run(before, now, where)
    with pytest.raises(UsageError, match="states of another optimizer"):
        previous_run.require_same_run(before, now, where, with_changes=True)


def test_the_memory_of_planned_gpus_follows_a_colon() -> None:
    assert parse_planned_gpus("8,64:141") == ([8, 64], 141.0)
    assert parse_planned_gpus("8") == ([8], 80.0)
    for text in ("8:", ":80", "8:0", "8:80:80"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_planned_gpus(text)


@pytest.mark.parametrize("samples", [0, 3, 103])
def test_a_plan_for_other_machines_has_a_step_with_any_data(samples: int) -> None:
    config = options(batch_size=4, plan_gpus=PlannedGpus([8]), max_steps=10, num_epochs=1)
    planned = Plan.of(config, {}, samples, ranks=8)
    assert planned.fills_a_step == (samples == 103)
    assert planned.total_steps == (3 if planned.fills_a_step else 1)
    assert planned.describe()["steps"].startswith(f"{planned.total_steps} (")
    if not planned.fills_a_step:
        with pytest.raises(UsageError, match="too small"):
            Plan.of(replace(config, plan_gpus=None), {}, samples, ranks=8)
