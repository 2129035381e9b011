"""Compute the steps, the batch and the learning rate of a run before any process group exists."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lib.checkpoints.vendor_tiers import split_place
from lib.core import commands, units
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.identity import find_differences
from lib.core.options import AUTO
from lib.core.paths import Experiment
from lib.optim import schedule
from lib.optim.optimizers import Choice
from lib.optim.schedule import Schedule
from lib.parallel.degrees import ALLGATHER
from lib.tokens import packing
from lib.tokens.batches import Pass
from lib.tokens.order import Division
from lib.train.batch_division import divide_batch, get_degrees, get_micro_batch
from lib.train.config import Config

if TYPE_CHECKING:  # imports torch
    from transformers import PreTrainedModel

    from lib.parallel.layout import ParallelLayout
    from lib.planning.trace import StepConfig


@dataclass(frozen=True)
class Plan:
    """The batch, the length and the identity of a run.

    inputs: fingerprints of model, dataset and tokenizer, by name. samples: number of samples in an
    epoch, None if unknown.
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

        ranks: number of ranks (default: those of this launch). With --plan-gpus, data that is too
        short for one step is not an error: the plan then has one step, see `fills_a_step`.
        """
        division = divide_batch(config, rank, ranks or get_world_size())
        if config.plan_gpus:
            steps = max(1, _count_full_steps(config, samples, division.global_batch))
        else:
            steps = count_steps(config, samples, division.global_batch)
        return cls(config, inputs, division, samples, steps)

    @property
    def fills_a_step(self) -> bool:
        """Return whether the data suffices for one step; a dry run only warns if it does not."""
        return _count_full_steps(self.config, self.samples, self.division.global_batch) > 0

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

    def is_evaluated(self, step: int) -> bool:
        """Return whether --eval-freq evaluates the model after a step; the last one always is."""
        every = self.config.eval_freq
        return step == self.total_steps or bool(every and step % every == 0)

    def identity(self) -> dict[str, Any]:
        """Return the identity that a launch must share with the run that it resumes."""
        return self.config.identity(self.inputs, self.division.global_batch)

    def require_alike(self, layout: ParallelLayout) -> None:
        """Raise UsageError if ranks were started with different data or options.

        All ranks must call this. Otherwise they would train different runs, or hang when one rank
        saves alone.
        """
        from lib.parallel.layout import gather

        place = self.config.ckpt_local_dir
        vendor, _ = split_place(place or "")
        identity_here = self.identity()
        identity_here["options"] |= self.config.values_of(Role.ALIKE) | {
            "ckpt_local_dir": place if vendor else bool(place),
            "sample_prompts": bool(self.config.sample_prompts),
            "steps": self.total_steps,
            "batch_size": self.division.micro_batch,
        }
        identity_here["inputs"] = identity_here["inputs"] | {"samples": self.samples}
        for rank, identity in enumerate(gather(identity_here, layout.control)):
            if changes := find_differences(identity, identity_here):
                raise UsageError(
                    f"ranks {rank} and {layout.rank} were started differently",
                    found="\n".join(
                        change.describe(f"on rank {rank}", f"on rank {layout.rank}")
                        for change in changes
                    ),
                    expected="the same command, dataset and model on every node",
                )

    def describe(self) -> dict[str, str]:
        """Return the steps, epochs and learning rate with their derivation, as table rows."""
        global_batch = self.division.global_batch
        total_samples = self.total_steps * global_batch
        tokens = f"{self.total_steps * self.tokens_per_step:,} tokens"
        down = "" if self.schedule.kind == "constant" else f", then to {self.schedule.minimum:g}"
        warmup = (
            f"{units.counted(self.schedule.warmup, 'step')} up to {self.schedule.peak:g}"
            if self.schedule.warmup
            else f"{self.schedule.peak:g} without warm-up"
        )
        rows = {
            "tokens/step": describe_batch(
                self.division, self.config.seq_length, self.config.context_parallel
            ),
            "epoch": "of unknown length",
            "steps": f"{self.total_steps:,} ({tokens})",
            "learning rate": f"{self.schedule.kind}, {warmup}{down}",
        }
        if not self.samples:
            return rows if self.samples is None else rows | {"epoch": "no sample"}
        epochs = count_epochs(self.config)
        passes = total_samples / self.samples
        omitted_samples = epochs * self.samples - total_samples if epochs else 0
        steps = f"{self.samples / global_batch:,.1f}".removesuffix(".0")
        noun = "step" if steps == "1" else "steps"
        one_pass = f"{units.counted(self.samples, 'sample')} = {steps} {noun}"
        rows |= {
            "epoch": f"1 epoch = {one_pass}",
            "steps": f"{self.total_steps:,} ({passes:.2f} epochs, {tokens})",
        }
        if steps_per_epoch := self.config.steps_per_epoch:
            rows |= {
                "epoch": f"{units.counted(steps_per_epoch, 'step')}; a pass over the data is "
                f"{one_pass}",
                "steps": f"{self.total_steps:,} ({passes:.2f} passes over the data, {tokens})",
            }
        if 0 < omitted_samples < global_batch:
            rows["left out"] = (
                f"{units.counted(omitted_samples, 'sample')} at the end, too few for a step"
            )
        return rows


def describe_batch(division: Division, seq_length: int, context: int = 1) -> str:
    """Return the tokens of a step as a product: `64 = 2 per process × 8 tokens × …`."""
    return (
        f"{division.global_batch * seq_length:,} = {division.micro_batch} per process × "
        f"{seq_length:,} tokens × {division.accumulation} accumulation × "
        f"{describe_readers(division.dp_size, context)}"
    )


def describe_readers(dp_size: int, context: int) -> str:
    """Return `8 ranks`, or `2 groups of 4 ranks` if ranks share rows."""
    if context == 1:
        return units.counted(dp_size, "rank")
    return f"{units.counted(dp_size, 'group')} of {context} ranks"


def get_pass(config: Config, batch: int) -> Pass:
    """Return the size of a forward and backward pass. batch: samples of a micro-batch."""
    return Pass(batch, config.seq_length, get_degrees(config).context)


def get_world_size() -> int:
    """Return the number of ranks of this launch; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def count_epochs(config: Config) -> int | None:
    """Return the number of epochs; None if only a number of steps ends the run."""
    if config.steps_per_epoch:
        return None
    return config.num_epochs or (None if config.max_steps else 1)


def count_steps(config: Config, samples: int | None, global_batch: int) -> int:
    """Return the number of steps until --max-steps or --num-epochs, whichever is reached first.

    samples: number of samples in an epoch, None if unknown. global_batch: samples per step. Raises
    UsageError if the data is too small for one step.
    """
    if steps := _count_full_steps(config, samples, global_batch):
        return steps
    raise UsageError(
        "the dataset is too small for one step",
        found=f"{samples:,} samples in an epoch, {global_batch:,} in a step",
        expected="more data, a smaller --seq-length or --global-batch-size, or more --num-epochs",
    )


def _count_full_steps(config: Config, samples: int | None, global_batch: int) -> int:
    """Return the number of steps as `count_steps`, or 0 if the data is too small for one."""
    limits = [config.step_limit] if config.step_limit else []
    if samples is not None and (epochs := count_epochs(config)):
        limits.append(epochs * samples // global_batch)
    return 0 if samples == 0 else min(limits)


def make_step_without_attention(config: Config, ranks: int, on_gpu: bool) -> StepConfig:
    """Return the settings of a step that follow from the options alone, on `ranks` devices.

    Options that are still open count as 1 sample, no recomputation, and no gathered weights.
    """
    import torch

    from lib.parallel import compiling
    from lib.planning.trace import StepConfig

    batch = get_micro_batch(config)
    is_open = config.activation_checkpointing == AUTO
    degrees = get_degrees(config)
    samples_per_pass = batch * degrees.dp_size(ranks)
    global_batch = config.global_batch_size or samples_per_pass * (config.grad_accum_steps or 1)
    return StepConfig(
        ranks,
        min(config.shard_size or ranks, ranks),
        batch,
        config.seq_length,
        config.precision,
        "none" if is_open else config.activation_checkpointing,
        accumulates=global_batch > samples_per_pass,
        offload=config.cpu_offload and on_gpu,
        activation_offload=config.activation_offload and on_gpu,
        keep_gathered=config.keep_gathered,
        optimizer=Choice.of(config),
        on_gpu=on_gpu,
        context=degrees.context,
        context_method=AUTO
        if "context_parallel_method" in config.settled_by
        else config.context_parallel_method,
        compiled=compiling.is_compile_on(config.compile, torch.device("cuda" if on_gpu else "cpu")),
    )


def make_step_config(
    config: Config,
    model: PreTrainedModel,
    ranks: int,
    on_gpu: bool,
    most_documents: int | None = None,
) -> StepConfig:
    """Return the step of a run on `ranks` devices, in the form that memory estimates take.

    most_documents: the largest number of documents in a packed sample; its padding counts as a
    document (default: the limit of the packing). For open options see
    `make_step_without_attention`.
    """
    import torch

    from lib.parallel import attention

    is_packed = config.packing == "documents"
    if most_documents is None:
        most_documents = packing.choose_document_limit(config.seq_length) + 1
    for_any_gpu = bool(config.plan_gpus) or not torch.cuda.is_available()
    uses_packed_kernel = (
        is_packed
        and on_gpu
        and (
            config.attention == "flash_attention_2"
            or (
                config.attention in ("auto", "varlen")
                and not attention.varlen_problem(config.precision, model.config, for_any_gpu)
            )
        )
    )
    uses_mask = is_packed and not uses_packed_kernel and config.attention in ("auto", "sdpa")
    step = make_step_without_attention(config, ranks, on_gpu)
    documents = most_documents if uses_packed_kernel else 0
    return replace(step, masked=uses_mask, documents=documents)


def needs_boundaries(config: Config) -> bool:
    """Return whether attention is fastest with a kernel that takes the boundaries of documents."""
    gathers = config.context_parallel > 1 and config.context_parallel_method == ALLGATHER
    return config.packing == "documents" or gathers


def next_command(config: Config, experiment: Experiment) -> str:
    """Return a line with the command to type after a complete run."""
    save_dir = experiment.root.parent
    location = ["--save-dir", str(save_dir)] if str(save_dir) != "outputs" else []
    trust = ["--trust-remote-code"] if config.trust_remote_code else []
    return "next: " + commands.script(
        "05_export_checkpoint.py", "-e", experiment.root.name, *location, *trust
    )
