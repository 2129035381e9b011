"""What a run will do, worked out before any process group exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.core import publish
from lib.core.errors import Problems, UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.tokens.order import Division
from lib.train import schedule
from lib.train.schedule import Schedule

# Options that change the result; a run that resumes must be given the same.
_DECISIVE = ("seed", "lr", "min_lr", "warmup_steps", "lr_scheduler", "weight_decay", "beta1",
             "beta2", "grad_clip", "from_scratch")


@dataclass(frozen=True)
class Plan:
    """samples: windows in one epoch. inputs: fingerprints of model, dataset and tokenizer."""

    options: Options
    inputs: dict[str, str]
    seq_length: int
    precision: str
    division: Division
    samples: int
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
        decisive = {key: getattr(self.options, key) for key in _DECISIVE}
        decisive |= {"seq_length": self.seq_length, "precision": self.precision,
                     "global_batch_size": self.division.global_batch}
        return {"options": decisive, "inputs": self.inputs}

    def describe(self) -> dict[str, str]:
        """Return the derived numbers, each with how it comes about."""
        d, samples_needed = self.division, self.total_steps * self.division.global_batch
        epochs = samples_needed / self.samples
        asked = _epochs(self.options)
        left_out = asked * self.samples - samples_needed if asked else 0
        down = "" if self.schedule.kind == "constant" else f", then to {self.schedule.minimum:g}"
        rows = {
            "tokens/step": f"{self.tokens_per_step:,} = {d.micro_batch} per process × "
                           f"{self.seq_length} tokens × {d.accumulation} accumulation × "
                           f"{d.world_size} ranks",
            "epoch": f"{self.samples:,} samples = {self.samples / d.global_batch:,.1f} steps of "
                     f"{d.global_batch}",
            "steps": f"{self.total_steps:,} ({epochs:.2f} epochs, "
                     f"{self.total_steps * self.tokens_per_step:,} tokens)",
            "learning rate": f"{self.schedule.kind}, {self.schedule.warmup} steps up to "
                             f"{self.schedule.peak:g}{down}",
        }
        if 0 < left_out < d.global_batch:
            rows["left out"] = f"{left_out} samples at the end that fill no batch"
        return rows


def launched_size() -> int:
    """Return the number of ranks that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def divide(options: Options, rank: int, ranks: int) -> Division:
    """Return how a global batch is divided; UsageError when it cannot be."""
    if options.global_batch_size is None:
        return Division(options.batch_size, options.grad_accum_steps or 1, rank, ranks)
    per_pass = options.batch_size * ranks
    accumulation, rest = divmod(options.global_batch_size, per_pass)
    if rest or not accumulation:
        raise UsageError(f"--global-batch-size {options.global_batch_size} cannot be divided",
                         expected=f"a multiple of {per_pass} = {options.batch_size} per process "
                                  f"(--batch-size) × {ranks} ranks")
    return Division(options.batch_size, accumulation, rank, ranks)


def _epochs(options: Options) -> int | None:
    """Return after how many passes over the data training ends; None: only --max-steps ends it."""
    return options.num_epochs or (None if options.max_steps else 1)


def total_steps(options: Options, samples: int, global_batch: int) -> int:
    """Return where training ends: at --max-steps or after --num-epochs, whichever comes first.

    Raises UsageError when the data is too small for a single step.
    """
    limits = [options.max_steps] if options.max_steps else []
    if epochs := _epochs(options):
        limits.append(epochs * samples // global_batch)
    if samples == 0 or min(limits) == 0:
        raise UsageError("the dataset is too small for one step",
                         found=f"{samples:,} samples in an epoch, {global_batch:,} in a step",
                         expected="more text, a smaller --seq-length or --global-batch-size, "
                                  "or more --num-epochs")
    return min(limits)


def check_options(options: Options) -> None:
    """Raise one UsageError that tells all contradictions between options."""
    problems = Problems()
    if options.global_batch_size and options.grad_accum_steps:
        problems.add("give --global-batch-size or --grad-accum-steps, not both")
    if options.min_lr is not None and options.min_lr > options.lr:
        problems.add(f"--min-lr {options.min_lr:g} is above --lr {options.lr:g}")
    for name in ("beta1", "beta2"):
        if getattr(options, name) >= 1:
            problems.add(f"--{name} must be below 1, got {getattr(options, name):g}")
    bad = not options.experiment_name or options.experiment_name in (".", "..") \
        or "/" in options.experiment_name
    if bad:
        problems.add(f"--experiment-name {options.experiment_name!r} is no name for a directory")
    problems.raise_if_any()


def has_begun(experiment: Experiment) -> bool:
    """Tell whether a directory holds training that could be lost: checkpoints, good or bad."""
    found = experiment.checkpoints
    return found.is_dir() and (bool(commit.scan(found)) or (found / "quarantine").is_dir())


def complete(experiment: Experiment, identity: dict[str, Any], steps: int) -> bool:
    """Tell whether a checkpoint of this very run stands at `steps` or beyond."""
    newest = next((c for c in commit.scan(experiment.checkpoints) if not c.problems()), None)
    return newest is not None and newest.step >= steps and not publish.differences(
        newest.commit()["identity"], identity)


def require_same(earlier: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Raise UsageError naming every difference that forbids to resume."""
    if changed := publish.differences(earlier, now):
        raise UsageError(f"{where} was begun with other settings", found="\n".join(changed),
                         run="use the same settings, another --experiment-name, or --overwrite to "
                             "start this one anew (the old one is kept aside)")
