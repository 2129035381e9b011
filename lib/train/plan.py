"""Compute what a run will do, before any process group exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib.core import commands, units
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.identity import differences
from lib.core.paths import Experiment
from lib.optim import schedule
from lib.optim.schedule import Schedule
from lib.parallel.degrees import Degrees
from lib.tokens import packing
from lib.tokens.order import Division
from lib.train.config import AUTO, Config

if TYPE_CHECKING:  # imports torch
    from transformers import PreTrainedModel

    from lib.parallel.layout import ParallelLayout
    from lib.planning.trace import StepConfig


@dataclass(frozen=True)
class Plan:
    """The batch, the length and the identity of a run.

    inputs: fingerprints of model, dataset and tokenizer, by name. samples: of one epoch, None if
    unknown.
    """

    config: Config
    inputs: dict[str, str]
    division: Division
    samples: int | None
    total_steps: int

    @classmethod
    def of(
        cls,
        config: Config,
        inputs: dict[str, str],
        samples: int | None,
        rank: int = 0,
        ranks: int | None = None,
    ) -> Plan:
        """Return the plan of a run; UsageError if the batch cannot be divided or data is too short.

        ranks: None for those of this launch. With --plan-gpus, data that is too short for one step
        is not an error: the plan has one step then, see `fills_a_step`.
        """
        division = divide(config, rank, ranks or launched_size())
        if config.plan_gpus:
            steps = max(1, _steps(config, samples, division.global_batch))
        else:
            steps = total_steps(config, samples, division.global_batch)
        return cls(config, inputs, division, samples, steps)

    @property
    def fills_a_step(self) -> bool:
        """Return whether the data suffices for one step; otherwise a plan only warns."""
        return _steps(self.config, self.samples, self.division.global_batch) > 0

    @property
    def tokens_per_step(self) -> int:
        return self.division.global_batch * self.config.seq_length

    @property
    def schedule(self) -> Schedule:
        """Return the learning rate as a function of the step."""
        config = self.config
        warmup = (
            config.warmup_steps
            if config.warmup_steps is not None
            else schedule.default_warmup(self.total_steps)
        )
        return Schedule(config.lr_scheduler, config.lr, config.min_lr, warmup, self.total_steps)

    def identity(self) -> dict[str, Any]:
        """Return the identity that a launch must share with the run that it resumes."""
        return self.config.identity(self.inputs, self.division.global_batch)

    def require_alike(self, layout: ParallelLayout) -> None:
        """Raise UsageError if ranks were started with different data or options.

        All ranks must call this. Otherwise they would train different runs, or hang when one rank
        saves alone.
        """
        from lib.parallel.layout import gather

        mine = self.identity()
        mine["options"] |= self.config.values_of(Role.ALIKE) | {
            "ckpt_local_dir": bool(self.config.ckpt_local_dir),
            "steps": self.total_steps,
            "batch_size": self.division.micro_batch,
        }
        mine["inputs"] = mine["inputs"] | {"samples": self.samples}
        for rank, other in enumerate(gather(mine, layout.control)):
            if changes := differences(other, mine):
                raise UsageError(
                    f"ranks {rank} and {layout.rank} were started differently",
                    found="\n".join(
                        each.describe(f"on rank {rank}", f"on rank {layout.rank}")
                        for each in changes
                    ),
                    expected="the same command, dataset and model on every node",
                )

    def describe(self) -> dict[str, str]:
        """Return the derived numbers, each with its derivation, as rows of a table."""
        d = self.division
        samples_needed = self.total_steps * self.division.global_batch
        tokens = f"{self.total_steps * self.tokens_per_step:,} tokens"
        down = "" if self.schedule.kind == "constant" else f", then to {self.schedule.minimum:g}"
        warmup = (
            f"{units.counted(self.schedule.warmup, 'step')} up to {self.schedule.peak:g}"
            if self.schedule.warmup
            else f"{self.schedule.peak:g} without warm-up"
        )
        rows = {
            "tokens/step": product(d, self.config.seq_length),
            "epoch": "of unknown length",
            "steps": f"{self.total_steps:,} ({tokens})",
            "learning rate": f"{self.schedule.kind}, {warmup}{down}",
        }
        if not self.samples:
            return rows if self.samples is None else rows | {"epoch": "no sample"}
        asked = epochs(self.config)
        passes = samples_needed / self.samples
        left_out = asked * self.samples - samples_needed if asked else 0
        a_pass = (
            f"{self.samples:,} samples = {self.samples / d.global_batch:,.1f} steps of "
            f"{d.global_batch}"
        )
        rows |= {"epoch": a_pass, "steps": f"{self.total_steps:,} ({passes:.2f} epochs, {tokens})"}
        if own := self.config.steps_per_epoch:
            rows |= {
                "epoch": f"{units.counted(own, 'step')}; a pass over the data is {a_pass}",
                "steps": f"{self.total_steps:,} ({passes:.2f} passes over the data, {tokens})",
            }
        if 0 < left_out < d.global_batch:
            rows["left out"] = f"{units.counted(left_out, 'sample')} at the end, too few for a step"
        return rows


def product(d: Division, seq_length: int) -> str:
    """Return the tokens of a step as the product of its factors."""
    return (
        f"{d.global_batch * seq_length:,} = {d.micro_batch} per process × {seq_length:,} "
        f"tokens × {d.accumulation} accumulation × {units.counted(d.dp_size, 'rank')}"
    )


def launched_size() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def degrees(config: Config) -> Degrees:
    """Return the degrees of parallelism that the options ask for."""
    return Degrees(config.shard_size)


def divide(config: Config, rank: int, ranks: int) -> Division:
    """Return how the samples of a step are divided; UsageError if they cannot be.

    rank, ranks: of this launch or of a planned one. A batch size that is still open counts as 1.
    """
    batch = _samples(config)
    dp_rank = degrees(config).dp_rank(rank)
    dp_size = degrees(config).dp_size(ranks)
    if config.global_batch_size is None:
        return Division(batch, config.grad_accum_steps or 1, dp_rank, dp_size)
    per_pass = batch * dp_size
    accumulation, rest = divmod(config.global_batch_size, per_pass)
    if rest or not accumulation:
        raise UsageError(
            f"--global-batch-size {config.global_batch_size} cannot be divided",
            expected=f"a multiple of {per_pass} = {batch} per process "
            f"(--batch-size) × {dp_size} ranks",
        )
    return Division(batch, accumulation, dp_rank, dp_size)


def _samples(config: Config) -> int:
    """Return the samples of a process in a micro-batch; 1 while that is open."""
    return 1 if config.batch_size in (None, AUTO) else config.batch_size


def epochs(config: Config) -> int | None:
    """Return the number of passes over the data; None if only a number of steps ends training."""
    if config.steps_per_epoch:
        return None
    return config.num_epochs or (None if config.max_steps else 1)


def total_steps(config: Config, samples: int | None, global_batch: int) -> int:
    """Return the number of steps: the options' limit or --num-epochs, whichever comes first.

    Raises UsageError if the data is too small for one step.
    """
    if steps := _steps(config, samples, global_batch):
        return steps
    raise UsageError(
        "the dataset is too small for one step",
        found=f"{samples:,} samples in an epoch, {global_batch:,} in a step",
        expected="more text, a smaller --seq-length or --global-batch-size, or more --num-epochs",
    )


def _steps(config: Config, samples: int | None, global_batch: int) -> int:
    """Return the number of steps; 0 if the data is too small for one."""
    limits = [config.step_limit] if config.step_limit else []
    if samples is not None and (asked := epochs(config)):
        limits.append(asked * samples // global_batch)
    return 0 if samples == 0 else min(limits)


def step_config(
    config: Config,
    model: PreTrainedModel,
    ranks: int,
    on_gpu: bool,
    most_documents: int | None = None,
) -> StepConfig:
    """Return the step whose memory is planned, for a run on `ranks` devices.

    most_documents: in a packed sample, with its padding; None: the limit of the packing. Options
    that are still open count as 1 sample, no recomputation, and no gathered weights.
    """
    import torch

    from lib.parallel import attention, compiling
    from lib.planning.trace import StepConfig

    offload = config.cpu_offload and on_gpu
    shard_size = min(config.shard_size or ranks, ranks)
    batch = _samples(config)
    recompute = (
        "none" if config.activation_checkpointing == AUTO else config.activation_checkpointing
    )
    a_pass = batch * degrees(config).dp_size(ranks)
    per_step = config.global_batch_size or a_pass * (config.grad_accum_steps or 1)
    is_packed = config.packing == "documents"
    if most_documents is None:
        most_documents = packing.choose_document_limit(config.seq_length) + 1
    elsewhere = bool(config.plan_gpus) or not torch.cuda.is_available()
    by_kernel = (
        is_packed
        and on_gpu
        and (
            config.attention == "flash_attention_2"
            or (
                config.attention in ("auto", "varlen")
                and not attention.varlen_problem(config.precision, model.config, elsewhere)
            )
        )
    )
    by_mask = is_packed and not by_kernel and config.attention in ("auto", "sdpa")
    is_compiled = compiling.is_compile_on(config.compile, torch.device("cuda" if on_gpu else "cpu"))
    return StepConfig(
        ranks,
        shard_size,
        batch,
        config.seq_length,
        config.precision,
        recompute,
        per_step > a_pass,
        offload,
        bool(config.keep_gathered),
        by_mask,
        most_documents * by_kernel,
        optimizer=config.optimizer,
        on_gpu=on_gpu,
        compiled=is_compiled,
    )


def next_command(config: Config, experiment: Experiment) -> str:
    """Return the line that names the command to type after a complete run."""
    save_dir = experiment.root.parent
    where = ["--save-dir", str(save_dir)] if str(save_dir) != "outputs" else []
    trust = ["--trust-remote-code"] if config.trust_remote_code else []
    return "next: " + commands.script(
        "05_export_checkpoint.py", "-e", experiment.root.name, *where, *trust
    )
