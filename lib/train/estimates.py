"""What a run will take, estimated before it begins: time, checkpoints, and a batch of usual size.

docs/explanation/planning.md says where the numbers are from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.core import units
from lib.tokens.batches import Pass
from lib.tokens.order import Division
from lib.train.plan import Plan

MEASURED = 20  # steps of a launch after which it tells how long they take
_MFU = {"GPU": 0.4, "rank": 0.3}  # a usual share of the peak; rank: on a CPU
_FULL_PASS = {"GPU": 4096, "rank": 512}  # tokens of a device in a pass; with fewer it waits more
_TIMED_FROM = 20e6  # parameters; what takes the time of smaller models is not arithmetic
# Tokens per step in published runs: of pre-training by parameters, and of training on.
_PRE_TRAINING = ((1e9, 1 << 19), (5e9, 1 << 20), (math.inf, 1 << 21))
_TRAINING_ON = 1 << 18
_FEWEST_TRAINING_ON = 1 << 16
_MANY = 1 << 22  # of the largest models' fine-tuning
_MOST = 1 << 24  # of the largest models' pre-training
_MARGIN = 4  # so many times fewer tokens than published are worth a warning
_WARNS_FROM = 50e6  # parameters
_LONG = 10_000  # steps
_FEWEST_KEPT = 2  # checkpoints, as in commit.prune_checkpoints


@dataclass(frozen=True)
class Hardware:
    """peak: FLOP/s of one of `ranks` devices. source: of that number. kind: `GPU`, or `rank`."""

    ranks: int
    peak: float
    source: str
    kind: str


@dataclass(frozen=True)
class Work:
    """flops: per token. checkpoint: bytes of one. scratch: weights drawn from the seed."""

    parameters: int
    flops: float
    checkpoint: float
    scratch: bool
    validates: bool


def rows(plan: Plan, work: Work, hardware: Hardware) -> dict[str, str]:
    """Return how long the steps take, and what checkpoints are written and kept."""
    found = {"checkpoints": _checkpoints(plan, work)}
    if work.parameters < _TIMED_FROM:
        return found
    a_pass = Pass(plan.division.micro_batch, plan.config.seq_length).tokens_per_device
    small = (
        f", longer with only {a_pass:,} tokens in a pass"
        if a_pass < _FULL_PASS[hardware.kind]
        else ""
    )
    later = f"; measured after {MEASURED} steps" if plan.total_steps > MEASURED else ""
    return {
        "time": f"about {_time(plan, work, hardware)}, estimated at "
        f"{100 * _MFU[hardware.kind]:.0f} % of {hardware.peak / 1e12:.3g} TFLOP/s on "
        f"{units.counted(hardware.ranks, hardware.kind)} ({hardware.source})"
        f"{small}{later}",
        **found,
    }


def step_seconds(plan: Plan, work: Work, hardware: Hardware) -> float | None:
    """Return the estimated duration of a step, None for a small model."""
    return _step(plan, work, hardware) if work.parameters >= _TIMED_FROM else None


def advice(plan: Plan, work: Work, hardware: Hardware) -> str | None:
    """Return what is unusual about the tokens per step, and what to give instead; else None."""
    tokens = plan.tokens_per_step
    steps = plan.total_steps
    usual = (
        next(usual for below, usual in _PRE_TRAINING if work.parameters < below)
        if work.scratch
        else _TRAINING_ON
    )
    fewest, most = (usual, _MOST) if work.scratch else (_FEWEST_TRAINING_ON, _MANY)
    few = tokens * _MARGIN < fewest and steps >= _LONG
    if work.parameters < _WARNS_FROM or not (few or tokens > _MOST):
        return None
    batch = _batch_of(usual if few else _MANY, plan)
    then = max(1, steps * plan.division.global_batch // batch)
    also = f" --max-steps {then}" if plan.config.max_steps else ""
    time = (
        f"; the time stays at about {_time(plan, work, hardware)} by the estimate"
        if work.parameters >= _TIMED_FROM
        else ""
    )
    what = "pre-training" if work.scratch else "fine-tuning and continued pre-training"
    return (
        f"{tokens:,} tokens per step are {'few' if few else 'many'} for a model of "
        f"{units.count(work.parameters)} parameters\n"
        f"  published: {units.count(fewest)} to {units.count(most)} in {what} "
        f"(docs/explanation/planning.md)\n"
        f"  now:       {_length(plan, steps)}\n"
        f"  instead:   --global-batch-size {batch}{also} for "
        f"{batch * plan.config.seq_length:,} tokens per step: {_length(plan, then)} with as "
        f"many tokens in all{time}"
    )


def _batch_of(tokens: int, plan: Plan) -> int:
    """Return the global batch of about so many tokens that can be divided as this one is."""
    d: Division = plan.division
    per_pass = d.micro_batch * d.dp_size
    return per_pass * max(1, round(tokens / plan.config.seq_length / per_pass))


def _time(plan: Plan, work: Work, hardware: Hardware) -> str:
    return units.duration(plan.total_steps * _step(plan, work, hardware))


def _step(plan: Plan, work: Work, hardware: Hardware) -> float:
    return (
        plan.tokens_per_step * work.flops / (hardware.ranks * hardware.peak * _MFU[hardware.kind])
    )


def _length(plan: Plan, steps: int) -> str:
    return f"{units.counted(steps, 'step')}, {units.counted(_written(plan, steps), 'checkpoint')}"


def _written(plan: Plan, steps: int) -> int:
    return units.ceil_div(steps, plan.config.ckpt_freq)


def _checkpoints(plan: Plan, work: Work) -> str:
    """Return how many checkpoints are written, and how many exist at the same time."""
    config = plan.config
    count = _written(plan, plan.total_steps)
    newest = max(config.ckpt_keep, _FEWEST_KEPT)
    every = config.ckpt_keep_every
    kinds = {f"the newest {newest}": newest, "the best": int(work.validates)}
    if every:
        kinds[f"each {every:,}th step"] = plan.total_steps // math.lcm(every, config.ckpt_freq)
    kinds["the one being written"] = 1
    most = sum(kinds.values())
    said = f"{count:,} of {units.size(work.checkpoint)}"
    if not config.ckpt_keep or count <= most:
        return said + (f", {units.size(count * work.checkpoint)} in all" if count > 1 else "")
    return (
        f"{said}: {units.size(count * work.checkpoint)} written in all, at most "
        f"{units.size(most * work.checkpoint)} at once in {most:,} "
        f"({', '.join(kind for kind, some in kinds.items() if some)})"
    )
