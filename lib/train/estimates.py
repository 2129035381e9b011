"""Estimate before a run starts how long it takes and what it saves, and suggest a usual batch.

docs/explanation/planning.md names the sources of the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.core import units
from lib.tokens.batches import Pass
from lib.tokens.order import Division
from lib.train.plan import Plan

MEASURED = 20  # steps after which a launch reports the measured time
_MFU = {"GPU": 0.4, "rank": 0.3}  # usual share of the peak; rank: on a CPU
_FULL_PASS = {
    "GPU": 4096,
    "rank": 512,
}  # tokens per micro-batch; fewer are slower
_TIMED_FROM = 20e6  # parameters; the time of smaller models does not depend on FLOPs
# Tokens per step in published runs: of pre-training by parameters, and of fine-tuning.
_PRE_TRAINING = ((1e9, 1 << 19), (5e9, 1 << 20), (math.inf, 1 << 21))
_FINE_TUNING = 1 << 18
_FEWEST_FINE_TUNING = 1 << 16
_MANY = 1 << 22  # of the largest models' fine-tuning
_MOST = 1 << 24  # of the largest models' pre-training
_MARGIN = 4  # warn from so many times fewer tokens than published on
_WARNS_FROM = 50e6  # parameters
_LONG = 10_000  # steps
_FEWEST_KEPT = 2  # checkpoints, as in commit.prune_checkpoints


@dataclass(frozen=True)
class Hardware:
    """The devices of a run.

    peak: FLOP/s of each device. source: of that number. kind: `GPU`, or `rank` for a CPU.
    """

    ranks: int
    peak: float
    source: str
    kind: str


@dataclass(frozen=True)
class ModelCost:
    """The cost of training a model.

    flops: floating-point operations per token. checkpoint: bytes of a checkpoint. scratch: the
    weights are initialised from the seed. validates: a dataset has a validation split.
    """

    parameters: int
    flops: float
    checkpoint: float
    scratch: bool
    validates: bool


def describe_cost(plan: Plan, cost: ModelCost, hardware: Hardware) -> dict[str, str]:
    """Return rows of a table: the time of the steps, and the checkpoints written and kept."""
    table = {"checkpoints": _checkpoints(plan, cost)}
    if cost.parameters < _TIMED_FROM:
        return table
    a_pass = Pass(plan.division.micro_batch, plan.config.seq_length).tokens_per_device
    small = (
        f", longer with only {a_pass:,} tokens in a pass"
        if a_pass < _FULL_PASS[hardware.kind]
        else ""
    )
    later = f"; measured after {MEASURED} steps" if plan.total_steps > MEASURED else ""
    return {
        "time": f"about {_time(plan, cost, hardware)}, estimated at "
        f"{100 * _MFU[hardware.kind]:.0f} % of {hardware.peak / 1e12:.3g} TFLOP/s on "
        f"{units.counted(hardware.ranks, hardware.kind)} ({hardware.source})"
        f"{small}{later}",
        **table,
    }


def estimate_step_seconds(plan: Plan, cost: ModelCost, hardware: Hardware) -> float | None:
    """Return the estimated seconds of a step, None for a small model."""
    return _step(plan, cost, hardware) if cost.parameters >= _TIMED_FROM else None


def suggest_global_batch(plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
    """Return a warning about unusual tokens per step, with a better batch, or None."""
    tokens = plan.tokens_per_step
    steps = plan.total_steps
    usual = (
        next(usual for below, usual in _PRE_TRAINING if cost.parameters < below)
        if cost.scratch
        else _FINE_TUNING
    )
    fewest, most = (usual, _MOST) if cost.scratch else (_FEWEST_FINE_TUNING, _MANY)
    few = tokens * _MARGIN < fewest and steps >= _LONG
    if cost.parameters < _WARNS_FROM or not (few or tokens > _MOST):
        return None
    batch = _batch_of(usual if few else _MANY, plan)
    then = max(1, steps * plan.division.global_batch // batch)
    also = f" --max-steps {then}" if plan.config.max_steps else ""
    time = (
        f"; the time stays at about {_time(plan, cost, hardware)} by the estimate"
        if cost.parameters >= _TIMED_FROM
        else ""
    )
    what = "pre-training" if cost.scratch else "fine-tuning and continued pre-training"
    return (
        f"{tokens:,} tokens per step are {'few' if few else 'many'} for a model of "
        f"{units.count(cost.parameters)} parameters\n"
        f"  published: {units.count(fewest)} to {units.count(most)} in {what} "
        f"(docs/explanation/planning.md)\n"
        f"  now:       {_length(plan, steps)}\n"
        f"  instead:   --global-batch-size {batch}{also} for "
        f"{batch * plan.config.seq_length:,} tokens per step: {_length(plan, then)} with as "
        f"many tokens in all{time}"
    )


def _batch_of(tokens: int, plan: Plan) -> int:
    """Return the global batch of about this many tokens that can be divided like that of a plan."""
    d: Division = plan.division
    per_pass = d.micro_batch * d.dp_size
    return per_pass * max(1, round(tokens / plan.config.seq_length / per_pass))


def _time(plan: Plan, cost: ModelCost, hardware: Hardware) -> str:
    return units.duration(plan.total_steps * _step(plan, cost, hardware))


def _step(plan: Plan, cost: ModelCost, hardware: Hardware) -> float:
    return (
        plan.tokens_per_step * cost.flops / (hardware.ranks * hardware.peak * _MFU[hardware.kind])
    )


def _length(plan: Plan, steps: int) -> str:
    return f"{units.counted(steps, 'step')}, {units.counted(_written(plan, steps), 'checkpoint')}"


def _written(plan: Plan, steps: int) -> int:
    return units.ceil_div(steps, plan.config.ckpt_freq)


def _checkpoints(plan: Plan, cost: ModelCost) -> str:
    """Return the number of checkpoints that are written, and that exist at the same time."""
    config = plan.config
    count = _written(plan, plan.total_steps)
    newest = max(config.ckpt_keep, _FEWEST_KEPT)
    every = config.ckpt_keep_every
    kinds = {f"the newest {newest}": newest, "the best": int(cost.validates)}
    if every:
        kinds[f"each {every:,}th step"] = plan.total_steps // math.lcm(every, config.ckpt_freq)
    kinds["the one being written"] = 1
    most = sum(kinds.values())
    written = f"{count:,} of {units.size(cost.checkpoint)}"
    if not config.ckpt_keep or count <= most:
        return written + (f", {units.size(count * cost.checkpoint)} in all" if count > 1 else "")
    return (
        f"{written}: {units.size(count * cost.checkpoint)} written in all, at most "
        f"{units.size(most * cost.checkpoint)} at once in {most:,} "
        f"({', '.join(kind for kind, some in kinds.items() if some)})"
    )
