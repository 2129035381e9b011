"""What a run will do, worked out before any process group exists."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from lib.core import commands, units
from lib.core.errors import Problems, UsageError
from lib.core.options import Options
from lib.optim import schedule
from lib.optim.schedule import Schedule
from lib.tokens.order import Division

AUTO = "auto"  # --batch-size, until a number stands in its place
LR_FROM_SCRATCH, LR = 3e-4, 3e-5  # defaults
# Options that change the result; a run that resumes must be given the same.
_DECISIVE = ("seed", "lr", "min_lr", "warmup_steps", "lr_scheduler", "weight_decay", "beta1",
             "beta2", "grad_clip", "spike_factor", "from_scratch", "packing")
# The same, but only where they are not the default: runs older than the option go on.
_DECISIVE_IF_GIVEN = {"optimizer": "adamw", "fp8_recipe": "tensorwise", "model_size": None,
                      "vocab_size": None}


@dataclass(frozen=True)
class Plan:
    """samples: windows in one epoch, None: not known. inputs: fingerprints of model, dataset and
    tokenizer, and what else a run that resumes must share.
    """

    options: Options
    inputs: dict[str, str]
    seq_length: int
    precision: str
    division: Division
    samples: int | None
    total_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.division.global_batch * self.seq_length

    @property
    def schedule(self) -> Schedule:
        """Return the learning rate as a function of the step."""
        opts = self.options
        warmup = opts.warmup_steps if opts.warmup_steps is not None \
            else schedule.default_warmup(self.total_steps)
        return Schedule(opts.lr_scheduler, opts.lr, opts.min_lr, warmup, self.total_steps)

    def identity(self) -> dict[str, Any]:
        """Return what a run that resumes must share."""
        return identity(self.options, self.inputs, self.seq_length, self.precision,
                        self.division.global_batch)

    def describe(self) -> dict[str, str]:
        """Return the derived numbers, each with how it comes about."""
        d, samples_needed = self.division, self.total_steps * self.division.global_batch
        tokens = f"{self.total_steps * self.tokens_per_step:,} tokens"
        down = "" if self.schedule.kind == "constant" else f", then to {self.schedule.minimum:g}"
        warmup = f"{units.counted(self.schedule.warmup, 'step')} up to {self.schedule.peak:g}" \
            if self.schedule.warmup else f"{self.schedule.peak:g} without warm-up"
        rows = {"tokens/step": product(d, self.seq_length), "epoch": "of unknown length",
                "steps": f"{self.total_steps:,} ({tokens})",
                "learning rate": f"{self.schedule.kind}, {warmup}{down}"}
        if self.samples is None:
            return rows
        asked, passes = epochs(self.options), samples_needed / self.samples
        left_out = asked * self.samples - samples_needed if asked else 0
        rows |= {"epoch": f"{self.samples:,} samples = {self.samples / d.global_batch:,.1f} steps "
                          f"of {d.global_batch}",
                 "steps": f"{self.total_steps:,} ({passes:.2f} epochs, {tokens})"}
        if 0 < left_out < d.global_batch:
            rows["left out"] = f"{units.counted(left_out, 'sample')} at the end, too few for a step"
        return rows


def product(d: Division, seq_length: int) -> str:
    """Return the tokens of a step with the factors they come from."""
    return f"{d.global_batch * seq_length:,} = {d.micro_batch} per process × {seq_length:,} " \
           f"tokens × {d.accumulation} accumulation × {units.counted(d.world_size, 'rank')}"


def identity(options: Options, inputs: dict[str, str], seq_length: int, precision: str,
             global_batch: int) -> dict[str, Any]:
    """Return what decides the result of a run, in the form publish.py compares."""
    decisive = {key: getattr(options, key) for key in _DECISIVE}
    decisive |= {key: given for key, default in _DECISIVE_IF_GIVEN.items()
                 if (given := getattr(options, key)) != default}
    return {"options": {**decisive, "seq_length": seq_length, "precision": precision,
                        "global_batch_size": global_batch}, "inputs": inputs}


def launched_size() -> int:
    """Return the number of ranks that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def divide(options: Options, rank: int, ranks: int) -> Division:
    """Return how a global batch is divided; UsageError when it cannot be.

    A batch size that is still open counts as 1, which divides what any other does.
    """
    batch = 1 if options.batch_size == AUTO else options.batch_size
    if options.global_batch_size is None:
        return Division(batch, options.grad_accum_steps or 1, rank, ranks)
    per_pass = batch * ranks
    accumulation, rest = divmod(options.global_batch_size, per_pass)
    if rest or not accumulation:
        raise UsageError(f"--global-batch-size {options.global_batch_size} cannot be divided",
                         expected=f"a multiple of {per_pass} = {batch} per process "
                                  f"(--batch-size) × {ranks} ranks")
    return Division(batch, accumulation, rank, ranks)


def remember_batch(options: Options, begun_with: int | None) -> None:
    """Let a run that goes on with `--batch-size auto` keep the samples per step it has, if known.

    The memory of another machine, or a new estimate, would choose others.
    """
    if options.batch_size == AUTO and options.global_batch_size is None and begun_with:
        options.global_batch_size, options.grad_accum_steps = begun_with, None


def epochs(options: Options) -> int | None:
    """Return after how many passes over the data training ends; None: only --max-steps ends it."""
    return options.num_epochs or (None if options.max_steps else 1)


def total_steps(options: Options, samples: int | None, global_batch: int) -> int:
    """Return where training ends: at --max-steps or after --num-epochs, whichever comes first.

    Raises UsageError when the data is too small for a single step.
    """
    if samples is None:
        return options.max_steps
    limits = [options.max_steps] if options.max_steps else []
    if asked := epochs(options):
        limits.append(asked * samples // global_batch)
    if samples == 0 or min(limits) == 0:
        raise UsageError("the dataset is too small for one step",
                         found=f"{samples:,} samples in an epoch, {global_batch:,} in a step",
                         expected="more text, a smaller --seq-length or --global-batch-size, "
                                  "or more --num-epochs")
    return min(limits)


def require_falling(options: Options, lr: float) -> None:
    """Raise UsageError when the learning rate would rise to its minimum."""
    if options.min_lr is not None and options.min_lr > lr:
        raise UsageError(f"--min-lr {options.min_lr:g} is above --lr {lr:g}")


def check_options(options: Options) -> None:
    """Raise one UsageError that tells all contradictions between options."""
    problems = Problems()
    if options.global_batch_size and options.grad_accum_steps:
        problems.add("give --global-batch-size or --grad-accum-steps, not both")
    largest = LR_FROM_SCRATCH if options.lr is None else options.lr  # the default is at most this
    problems.collect(lambda: require_falling(options, largest))
    for ranks in options.plan_gpus or [launched_size()]:
        if options.shard_size and ranks % options.shard_size:
            problems.add(f"--shard-size {options.shard_size} does not divide the "
                         f"{units.counted(ranks, 'rank')}",
                         expected="replicas of equal size")
    if options.plan_gpus and not options.dry_run:
        problems.add("--plan-gpus plans and does not train", run=commands.again("--dry-run"))
    if options.ckpt_local_freq and not (options.ckpt_local_dir or options.ckpt_hyperpod):
        problems.add("--ckpt-local-freq belongs to --ckpt-local-dir or --ckpt-hyperpod")
    if (options.ckpt_local_freq or 0) >= options.ckpt_freq:
        problems.add(f"--ckpt-local-freq {options.ckpt_local_freq} is not below --ckpt-freq "
                     f"{options.ckpt_freq}", expected="local checkpoints are the frequent ones")
    if options.ckpt_local_dir and options.ckpt_hyperpod:
        problems.add("give --ckpt-local-dir or --ckpt-hyperpod, not both")
    if not re.fullmatch(r"auto|https?://[^/@\s]+/?", options.ckpt_hyperpod or "auto"):
        problems.add(f"--ckpt-hyperpod {options.ckpt_hyperpod} is not an address",
                     expected="auto, or one like http://host:9200")
    for name in ("beta1", "beta2"):
        if getattr(options, name) >= 1:
            problems.add(f"--{name} must be below 1, got {getattr(options, name):g}")
    if options.resume_with_changes and not options.max_steps:
        problems.add("--resume-with-changes needs --max-steps: epochs of changed data or batches "
                     "would count from the beginning of the run")
    problems.raise_if_any()
