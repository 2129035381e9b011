"""Estimate the time and the checkpoints of a run before it starts, and suggest a usual batch size.

docs/explanation/planning.md names the sources of the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.core import units
from lib.train.plan import Plan, get_pass

MEASURED_STEPS = 20  # after so many steps, a launch reports the measured time
_USUAL_MFU = 0.4
_FULL_PASS_TOKENS = 4096  # smaller micro-batches are slower per token
_MIN_TIMED_PARAMETERS = 20e6  # the time of smaller models does not depend on FLOPs
# Tokens per step in published runs. Pre-training: (parameters below, tokens).
_PRE_TRAINING_TOKENS = ((1e9, 1 << 19), (5e9, 1 << 20), (math.inf, 1 << 21))
_FINE_TUNING_TOKENS = 1 << 18
_MIN_FINE_TUNING_TOKENS = 1 << 16
_MAX_FINE_TUNING_TOKENS = 1 << 22  # of the largest models
_MAX_PRE_TRAINING_TOKENS = 1 << 24  # of the largest models
_TOLERANCE = 4  # warn if a step has so many times fewer tokens than published
_MIN_WARNED_PARAMETERS = 50e6
_BACKWARD_SHARE = 2 / 3  # of the operations of a pass
_GRADIENT_BYTES = 4  # reduced in float32
_WEIGHT_BYTES = 2  # gathered in bf16 or fp16
_LONG_RUN_STEPS = 10_000
_LONG_BENCH_S = 300.0
_MIN_KEPT = 2  # checkpoints, as in commit.prune_checkpoints


@dataclass(frozen=True)
class Hardware:
    """The devices of a run.

    peak: FLOP/s of each GPU; None on a CPU, whose time is not estimated. source: where that number
    comes from, for messages. nodes: machines that contain the devices. network: bytes per second
    that a node can send to the others (default: not part of the estimate).
    """

    ranks: int
    peak: float | None
    source: str = ""
    nodes: int = 1
    network: float = math.inf


@dataclass(frozen=True)
class ModelCost:
    """The facts about a model that the estimates of a run need.

    flops: floating-point operations per token. attention: those of them in attention, between all
    tokens of a sample. checkpoint: bytes of a checkpoint. scratch: the
    weights are initialised from the seed. validates: a dataset has a validation split.
    """

    parameters: int
    flops: float
    attention: float
    checkpoint: float
    scratch: bool
    validates: bool


def describe_cost(plan: Plan, cost: ModelCost, hardware: Hardware) -> dict[str, str]:
    """Return rows of a table: the time of all steps, and the checkpoints written and kept."""
    table = {"checkpoints": _describe_checkpoints(plan, cost)}
    if not _has_time_estimate(cost, hardware):
        return table
    tokens = get_pass(plan.config, plan.division.micro_batch).tokens_per_device
    small_pass = (
        f", longer with only {tokens:,} tokens in a micro-batch"
        if tokens < _FULL_PASS_TOKENS
        else ""
    )
    is_measured = plan.total_steps > MEASURED_STEPS
    measured = f"; measured after {MEASURED_STEPS} steps" if is_measured else ""
    return {
        "time": f"about {_describe_time(plan, cost, hardware)}, estimated at "
        f"{describe_utilisation(hardware)}{small_pass}{measured}",
        **table,
    }


def _has_time_estimate(cost: ModelCost, hardware: Hardware) -> bool:
    return hardware.peak is not None and cost.parameters >= _MIN_TIMED_PARAMETERS


def estimate_step_seconds(plan: Plan, cost: ModelCost, hardware: Hardware) -> float | None:
    """Return the estimated seconds of a step; None on a CPU and for a very small model."""
    if not _has_time_estimate(cost, hardware):
        return None
    return _compute_step_seconds(plan, cost, hardware)


def estimate_forward_seconds(tokens: int, cost: ModelCost, hardware: Hardware) -> float | None:
    """Return the estimated seconds of forward passes over `tokens` on each GPU; None on a CPU."""
    if hardware.peak is None:
        return None
    forward = (1 - _BACKWARD_SHARE) * cost.flops
    return tokens * forward / (hardware.peak * _USUAL_MFU)


def describe_utilisation(hardware: Hardware) -> str:
    """Return the assumed speed of the GPUs, such as `40 % of 989 TFLOP/s on 8 GPUs`."""
    return (
        f"{100 * _USUAL_MFU:.0f} % of {(hardware.peak or 0.0) / 1e12:.3g} TFLOP/s on "
        f"{units.counted(hardware.ranks, 'GPU')} ({hardware.source})"
    )


def suggest_global_batch(plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
    """Return a warning about unusual tokens per step, with a better batch, or None."""
    tokens = plan.tokens_per_step
    steps = plan.total_steps
    usual = (
        next(usual for limit, usual in _PRE_TRAINING_TOKENS if cost.parameters < limit)
        if cost.scratch
        else _FINE_TUNING_TOKENS
    )
    fewest = usual if cost.scratch else _MIN_FINE_TUNING_TOKENS
    most = _MAX_PRE_TRAINING_TOKENS if cost.scratch else _MAX_FINE_TUNING_TOKENS
    is_few = tokens * _TOLERANCE < fewest and steps >= _LONG_RUN_STEPS
    is_many = tokens > _MAX_PRE_TRAINING_TOKENS
    if cost.parameters < _MIN_WARNED_PARAMETERS or not (is_few or is_many):
        return None
    batch = _round_batch(usual if is_few else _MAX_FINE_TUNING_TOKENS, plan)
    new_steps = max(1, steps * plan.division.global_batch // batch)
    max_steps = f" --max-steps {new_steps}" if plan.config.max_steps else ""
    time = (
        f"; the time stays at about {_describe_time(plan, cost, hardware)} by the estimate"
        if _has_time_estimate(cost, hardware)
        else ""
    )
    purpose = "pre-training" if cost.scratch else "fine-tuning and continued pre-training"
    return (
        f"{tokens:,} tokens per step are {'few' if is_few else 'many'} for a model of "
        f"{units.count(cost.parameters)} parameters\n"
        f"  published: {units.count(fewest)} to {units.count(most)} in {purpose} "
        f"(docs/explanation/planning.md)\n"
        f"  now:       {_describe_length(plan, steps)}\n"
        f"  instead:   --global-batch-size {batch}{max_steps} for "
        f"{batch * plan.config.seq_length:,} tokens per step: {_describe_length(plan, new_steps)} "
        f"with as many tokens in all{time}"
    )


def suggest_shorter_bench(plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
    """Return a warning if a bench takes many minutes, with an option that shortens its steps.

    A bench should show within a few minutes how fast micro-batches are, but a step of a recipe may
    contain dozens of micro-batches. Returns None for a short bench.
    """
    config = plan.config
    seconds = plan.total_steps * (estimate_step_seconds(plan, cost, hardware) or 0.0)
    now = plan.division.accumulation
    if now == 1 or seconds <= _LONG_BENCH_S:
        return None
    passes = max(1, int(now * _LONG_BENCH_S / seconds))
    samples = passes * plan.division.micro_batch * plan.division.dp_size
    option = (
        f"--grad-accum-steps {passes}"
        if config.grad_accum_steps
        else f"--global-batch-size {samples}"
    )
    return (
        f"--bench will take about {units.duration(seconds)} by the estimate. With {option}, a step "
        f"has {units.counted(passes, 'micro-batch')} instead of {now}, and --bench takes about "
        f"{units.duration(seconds * passes / now)}; the update of the weights then counts for more"
    )


def _round_batch(tokens: int, plan: Plan) -> int:
    """Return the global batch of about `tokens` tokens that the plan's ranks can divide."""
    samples_per_pass = plan.division.micro_batch * plan.division.dp_size
    passes = round(tokens / plan.config.seq_length / samples_per_pass)
    return samples_per_pass * max(1, passes)


def _describe_time(plan: Plan, cost: ModelCost, hardware: Hardware) -> str:
    return units.duration(plan.total_steps * _compute_step_seconds(plan, cost, hardware))


def _compute_step_seconds(plan: Plan, cost: ModelCost, hardware: Hardware) -> float:
    return sum(split_step_seconds(plan, cost, hardware))


def split_step_seconds(plan: Plan, cost: ModelCost, hardware: Hardware) -> tuple[float, float]:
    """Return for how many seconds of a step the GPUs compute, and wait for the network.

    The wait is the least for shards over all nodes: weights are gathered once per step,
    and gradients are reduced during the backward pass of each micro-batch.
    Runs that gather weights for each pass wait longer, and runs with a replica per node less.
    """
    assert hardware.peak is not None
    speed = hardware.ranks * hardware.peak * _USUAL_MFU  # FLOP/s
    computing = plan.tokens_per_step * cost.flops / speed
    passes = plan.division.accumulation
    # Bytes that a node sends to the others in a ring, for each byte per parameter.
    sent = cost.parameters * (1 - 1 / hardware.nodes)
    reducing = _GRADIENT_BYTES * sent / hardware.network
    waiting = max(0.0, reducing - _BACKWARD_SHARE * computing / passes)
    return computing, passes * waiting + _WEIGHT_BYTES * sent / hardware.network


def _describe_length(plan: Plan, steps: int) -> str:
    checkpoints = _count_saves(plan, steps)
    return f"{units.counted(steps, 'step')}, {units.counted(checkpoints, 'checkpoint')}"


def _count_saves(plan: Plan, steps: int) -> int:
    return units.ceil_div(steps, plan.config.ckpt_freq)


def _describe_checkpoints(plan: Plan, cost: ModelCost) -> str:
    """Return how many checkpoints are written, and how many exist at the same time."""
    config = plan.config
    count = _count_saves(plan, plan.total_steps)
    newest = max(config.ckpt_keep, _MIN_KEPT)
    kinds = {
        f"the newest {newest}": newest,
        "the best": int(cost.validates or bool(config.eval_suite)),
        "the one being written": 1,
    }
    most = sum(kinds.values())
    every = units.counted(config.ckpt_freq, "step")
    written = f"{count:,} of {units.size(cost.checkpoint)}"
    if count > 1:
        written += f", every {every}"
    if not config.ckpt_keep or count <= most:
        return written + (f", {units.size(count * cost.checkpoint)} in all" if count > 1 else "")
    return (
        f"{written}: {units.size(count * cost.checkpoint)} written in all, at most "
        f"{units.size(most * cost.checkpoint)} at once in {most:,} "
        f"({', '.join(kind for kind, number in kinds.items() if number)})"
    )
