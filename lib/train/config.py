"""Everything that stage 04 can be asked for, each option declared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.core import declared, options
from lib.core.declared import Role, option
from lib.core.options import (
    auto_on_off,
    count,
    factor,
    non_negative,
    on_off,
    positive,
    positive_int,
)
from lib.optim import schedule
from lib.optim.registry import OPTIMIZERS
from lib.parallel import recompute
from lib.planning.saving import GPU_HOURS_PER_FAILURE
from lib.train.lora_options import LoraOptions

AUTO = "auto"  # of --batch-size and --activation-checkpointing, until something is chosen
OFF = "off"
RESULT, ALIKE, LOCAL = Role
_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


def _auto_or_count(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else positive_int(text)


def _auto_off_or_positive(text: str) -> float | str:
    if text.lower() == AUTO:
        return AUTO
    # YAML reads `off` as false, and 0 times the loss is none.
    return OFF if text.lower() in (OFF, "false", "no") else non_negative(text) or OFF


def _or_switch(
    on: str | None, off: str, parse: Callable[[str], str] = str
) -> Callable[[str], str | None]:
    """Return what reads a value, or one of the words that other systems have for on and off."""
    words = {
        **dict.fromkeys(("on", "true", "yes", "1"), on),
        **dict.fromkeys(("off", "false", "no", "0"), off),
    }

    def read(text: str) -> str | None:
        return words[text.lower()] if text.lower() in words else parse(text)

    return read


@dataclass(frozen=True)
class Config(LoraOptions):
    """What a run is asked for, None or AUTO until settled. why: by field, where a value is from."""

    num_epochs: int | None = option(
        None,
        group="length and batch",
        role=LOCAL,
        parse=positive_int,
        first="passes over the data",
        help="passes over the data (default: 1 without --max-steps)",
    )
    max_steps: int | None = option(
        None,
        role=LOCAL,
        parse=positive_int,
        first="optimizer steps at most",
        help="optimizer steps at most (default: no limit)",
    )
    steps_per_epoch: int | None = option(
        None,
        role=LOCAL,
        parse=positive_int,
        help="let an epoch of --num-epochs be N steps, however much data there is (default: one "
        "pass over the data)",
    )
    batch_size: int = option(
        None,
        "-b",
        role=LOCAL,
        parse=_auto_or_count,
        first="samples in one pass",
        metavar="N|auto",
        help="samples per process in one pass; auto: the largest micro-batch that fits, at most "
        "32,768 tokens (2,048 on a CPU); with --global-batch-size typed the default is 1 "
        "everywhere (default: auto on a GPU, else 1)",
    )
    global_batch_size: int | None = option(
        None,
        role=RESULT,
        parse=positive_int,
        first="samples per step",
        help="samples per step over all ranks, instead of --grad-accum-steps (default: "
        "--batch-size × ranks)",
    )
    grad_accum_steps: int | None = option(
        None, role=LOCAL, parse=positive_int, help="passes per step (default: 1)"
    )
    seq_length: int = option(
        None,
        "-s",
        "--seq-len",
        role=RESULT,
        renumbers=True,
        parse=positive_int,
        first="tokens per sample",
        help="tokens per sample (default: 1024 or the model's limit)",
    )
    packing: str = option(
        None,
        role=RESULT,
        renumbers=True,
        choices=("concat", "documents"),
        help="concat: windows across documents; documents: whole documents that do not see each "
        "other, with padding (default: documents where there is a chat dataset, else concat)",
    )

    optimizer: str = option(
        "adamw",
        group="optimizer",
        role=RESULT,
        quiet=True,
        choices=tuple(OPTIMIZERS),
        help="adamw8bit: moments of one byte per number instead of four",
    )
    lr: float = option(
        None,
        "--max-lr",
        role=RESULT,
        parse=non_negative,
        first="peak learning rate",
        help="peak learning rate (default: 3e-5, from scratch 3e-4)",
    )
    min_lr: float = option(
        None,
        role=RESULT,
        parse=non_negative,
        help="learning rate at the last step (default: a tenth of the peak)",
    )
    warmup_steps: int | None = option(
        None,
        role=RESULT,
        parse=count,
        help="steps of linear warm-up (default: 5 %% of all, at most 1000)",
    )
    lr_scheduler: str = option(
        "cosine",
        role=RESULT,
        metavar="KIND",
        choices=schedule.KINDS,
        help="cosine, linear, constant or wsd (constant, then down in the last fifth)",
    )
    weight_decay: float = option(
        0.1,
        role=RESULT,
        parse=non_negative,
        help="AdamW decay of matrices; norms and biases are not decayed",
    )
    beta1: float = option(
        0.9, role=RESULT, parse=non_negative, help="AdamW decay of the first moment"
    )
    beta2: float = option(
        0.95, role=RESULT, parse=non_negative, help="AdamW decay of the second moment"
    )
    grad_clip: float = option(
        1.0, role=RESULT, parse=non_negative, help="largest global gradient norm, 0 for no limit"
    )
    spike_factor: float = option(
        30.0,
        role=RESULT,
        parse=factor,
        help="a step whose gradient norm is over X times the usual (a mean of 100 steps) changes "
        "nothing, like one that is NaN or infinite; 0: it does",
    )
    rollback_after: int = option(
        20,
        role=ALIKE,
        parse=positive_int,
        help="after N such steps in a row go back to the checkpoint before them and pass over "
        "their data, three times at most",
    )
    router_aux_loss: float | str = option(
        AUTO,
        role=RESULT,
        quiet=(AUTO, OFF),
        parse=_auto_off_or_positive,
        metavar="auto|off|X",
        help="mixture-of-experts models: train with the load-balancing loss times X, or move the "
        "biases of sigmoid routers by X in each step, as the family does; auto: from scratch with "
        "the family's number, and in fine-tuning if the model's config has output_router_logits "
        "(default: auto)",
    )
    precision: str = option(
        None,
        "--mixed-precision",
        role=RESULT,
        choices=_PRECISIONS,
        nargs="?",
        parse=_or_switch(None, "fp32", options.dtype(*_PRECISIONS)),
        help="compute dtype, without a value the default; masters are float32; bfloat16, float16 "
        "and float32 mean the same; fp8: as bf16, but the products of the blocks' linears in "
        "8 bits, on a GPU of the Ada generation or newer (default: bf16 where the hardware "
        "has it, else fp32)",
    )
    fp8_recipe: str = option(
        "tensorwise",
        role=RESULT,
        quiet=True,
        choices=("tensorwise", "rowwise"),
        help="with --precision fp8: a scale for each tensor, which is fastest, or for each of its "
        "rows, which rounds less",
    )

    device: str = option(
        "auto",
        group="speed and memory (none of it changes what is learned)",
        role=ALIKE,
        choices=("auto", "cpu"),
        help="auto: the GPUs of this machine, which are an error where torch cannot use them, or "
        "the CPU of one that has none; cpu: also where there are GPUs",
    )
    activation_checkpointing: str = option(
        AUTO,
        role=ALIKE,
        parse=_or_switch("full", "none"),
        nargs="?",
        const="full",
        choices=(AUTO, *recompute.KINDS),
        help="activations to compute again in the backward pass instead of keeping them: none, "
        "selective (the cheap ones) or full (all of a block, also without a value); auto: "
        "none where that fits by the memory plan, then selective, then full; a run that goes "
        "on keeps what it had",
    )
    compile: bool | None = option(
        None,
        role=ALIKE,
        parse=auto_on_off,
        help="compile the decoder blocks, the loss and the update of adamw8bit; the first step "
        "then takes a minute longer. on: a run ends if its blocks cannot be compiled; auto: "
        "compile with a GPU, and warn about a part that runs uncompiled (default: auto)",
    )
    deterministic: bool = option(
        False,
        role=ALIKE,
        parse=on_off,
        help="on a GPU: the same bits each time, also after a resume; attention takes longer "
        "(default: off)",
    )
    attention: str = option(
        "auto",
        role=ALIKE,
        choices=("auto", "flash", "sdpa", "varlen", "flash_attention_2", "flex"),
        help="auto: varlen for packed documents on a GPU, else sdpa; flash: flash_attention_2 "
        "where its package can train here, else auto",
    )
    cpu_offload: bool = option(
        False,
        role=ALIKE,
        parse=on_off,
        help="keep shards and optimizer states in host memory, at a price in speed",
    )
    keep_gathered: bool | None = option(
        None,
        role=ALIKE,
        parse=auto_on_off,
        help="keep the weights of all blocks gathered from forward to backward, and between the "
        "passes of a step, instead of gathering them again; never with --cpu-offload "
        "(default: auto, on where that fits well by the memory plan)",
    )
    shard_size: int | None = option(
        None,
        role=ALIKE,
        parse=positive_int,
        help="ranks that share one replica of the model, say the GPUs of a node (HSDP) (default: "
        "all ranks; from four nodes of GPUs on those of a node, if a step fits so by the "
        "memory plan)",
    )

    plan_only_warn: bool = option(
        False,
        group="memory and checkpoints ahead of time (with --dry-run, on any machine)",
        role=LOCAL,
        help="start a run that does not fit in memory by the plan, which only warns then",
    )
    plan_gpus: list[int] | None = option(
        None,
        role=LOCAL,
        parse=options.parse_counts,
        metavar="N,N,…",
        help="print the memory per GPU on so many GPUs, for each kind of activation checkpointing "
        "and several batch sizes (default: only the bytes of its states on the ranks of this "
        "launch)",
    )
    plan_gpu_memory: float = option(
        80.0, role=LOCAL, parse=positive, metavar="GIB", help="memory of one of those GPUs"
    )
    plan_gpu_tflops: float | None = option(
        None,
        role=LOCAL,
        parse=positive,
        help="TFLOP/s that one of them reaches at most, by its data sheet, for the time of a run "
        "(default: 989, of an H100; 67 in fp32)",
    )
    plan_mtbf_hours: float = option(
        GPU_HOURS_PER_FAILURE,
        role=LOCAL,
        parse=positive,
        metavar="HOURS",
        help="mean time to a failure of one of those GPUs (hours between failures of a job × its "
        "GPUs), for the best time between checkpoints (default: 45566, as published for Llama"
        " 3 405B on 16,384 GPUs)",
    )
    plan_write_gbps: float = option(
        2.0,
        role=LOCAL,
        parse=positive,
        metavar="GB/S",
        help="rate at which all ranks together write to --save-dir",
    )
    plan_step_seconds: float | None = option(
        None,
        role=LOCAL,
        parse=positive,
        metavar="S",
        help="duration of a step there, to tell --ckpt-freq in steps (default: not told in steps)",
    )

    log_freq: int = option(
        10,
        "--log-interval",
        group="logs, checkpoints and evaluation",
        role=ALIKE,
        parse=positive_int,
        help="steps between log lines",
    )
    log_style: str = option(
        "line",
        role=LOCAL,
        choices=("line", "dict"),
        help="on the console: an aligned line for people, or the dict with the four timers that "
        "each rank's log has",
    )
    ckpt_freq: int = option(
        500,
        "--checkpoint-interval",
        role=ALIKE,
        parse=positive_int,
        help="steps between checkpoints",
    )
    ckpt_keep: int = option(
        3,
        role=ALIKE,
        parse=count,
        help="newest checkpoints to keep (2 at least, and always the one with the lowest "
        "validation loss), 0 for all",
    )
    ckpt_keep_every: int | None = option(
        None,
        role=LOCAL,
        parse=positive_int,
        help="also keep the checkpoints of steps that are multiples of N (default: none)",
    )
    ckpt_async: bool = option(
        True,
        role=ALIKE,
        parse=on_off,
        help="write checkpoints while training goes on, from copies in host memory",
    )
    ckpt_local_dir: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        help="on each node's own disk: also save there, more often; a resume with the same ranks "
        "takes whichever is newest (default: none)",
    )
    ckpt_hyperpod: str | None = option(
        None,
        role=ALIKE,
        metavar="auto|URL",
        help="instead of --ckpt-local-dir: in the memory of the HyperPod cluster, whose service is"
        " found by itself or at an address (default: not used)",
    )
    ckpt_local_freq: int | None = option(
        None,
        role=ALIKE,
        parse=positive_int,
        help="steps between those (default: a tenth of --ckpt-freq)",
    )
    eval_freq: int = option(
        500, role=ALIKE, parse=count, help="steps between evaluations, 0 for only at the end"
    )
    eval_batches: int = option(
        100,
        role=ALIKE,
        parse=positive_int,
        help="global batches of the validation split in an evaluation",
    )
    max_minutes: float | None = option(
        None,
        role=LOCAL,
        parse=positive,
        help="save and stop (exit code 75) when the run has taken so long; the same command goes "
        "on (default: no limit)",
    )
    watchdog_minutes: float = option(
        30.0,
        role=LOCAL,
        parse=non_negative,
        help="end a process whose step takes longer, with the stacks of its threads in logs/; 0 "
        "for never",
    )
    wandb: bool = option(
        False,
        role=LOCAL,
        parse=on_off,
        help="also log to Weights & Biases, offline, in the experiment's wandb/ (`wandb sync` "
        "sends it later)",
    )
    profile: tuple[int, int] | None = option(
        None,
        role=LOCAL,
        parse=options.span,
        metavar="START:END",
        help="steps to record: a trace and a table of operations per rank, on a GPU also its "
        "memory, in the experiment's profile/ (default: none)",
    )

    config: Path | None = option(None, role=LOCAL)  # this one and those below: as in every stage
    dry_run: bool = option(False, role=LOCAL, first="print the plan and touch nothing")
    overwrite: bool = option(False, role=ALIKE)
    num_workers: int = option(1, role=LOCAL)
    no_progress: bool = option(False, role=LOCAL)
    why: Mapping[str, str] = field(default_factory=dict)

    def settled(self, why: str, **values: Any) -> Config:
        """Return it with other values. why: where they are from."""
        return replace(self, **values, why={**self.why, **dict.fromkeys(values, why)})

    def reopened(self, name: str) -> Config:
        """Return it with an option as nobody typed it, whatever it was settled to."""
        why = {other: text for other, text in self.why.items() if other != name}
        again: dict[str, Any] = {name: None, "why": why}
        return replace(self, **again)

    @property
    def chose_batch(self) -> bool:
        """Tell whether the batch is open, or was and has been chosen."""
        return self.batch_size == AUTO or "batch_size" in self.why

    @property
    def step_limit(self) -> int | None:
        """Return the most steps that the options allow, None where only the data ends a run."""
        if not self.steps_per_epoch or (self.max_steps and not self.num_epochs):
            return self.max_steps
        steps = self.steps_per_epoch * (self.num_epochs or 1)
        return min(steps, self.max_steps or steps)

    def having(self, *roles: Role) -> dict[str, Any]:
        """Return the values of the fields that have one of these roles."""
        return {
            each.name: getattr(self, each.name)
            for each in declared.list_fields(Config)
            if each.metadata["role"] in roles
        }

    def recorded(self) -> dict[str, Any]:
        """Return the options as a record holds them: what model and hardware decided is open."""
        again = {
            name: default
            for name, default in (
                ("seq_length", None),
                ("precision", None),
                ("activation_checkpointing", AUTO),
                ("keep_gathered", None),
                ("shard_size", None),
                ("router_aux_loss", AUTO),
            )
            if name in self.why
        }
        return options.to_plain_values(options.Options(**self.having(*Role) | again))

    def identity(self, inputs: Mapping[str, Any], global_batch: int) -> dict[str, Any]:
        """Return what decides the result of a run, as lib/core/identity.py compares it.

        inputs: fingerprints of model, dataset and tokenizer. global_batch: samples in a step.
        """
        left_out = {
            each.name
            for each in declared.list_fields(Config)
            if (quiet := each.metadata["quiet"])
            and getattr(self, each.name) in (quiet if isinstance(quiet, tuple) else (each.default,))
        }
        decisive = {
            name: value for name, value in self.having(RESULT).items() if name not in left_out
        }
        return {"options": {**decisive, "global_batch_size": global_batch}, "inputs": dict(inputs)}


DEFAULTS = Config()
