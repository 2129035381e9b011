"""Declare the options of precision and parallelism, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from lib.core import options
from lib.core.declared import Role, option
from lib.core.options import AUTO, OFF, non_negative, on_off, or_switch, positive_int
from lib.models.options import FLOAT8_RECIPES
from lib.parallel.degrees import ALLGATHER, RECOMPUTATIONS, ULYSSES

_PRECISIONS = ("bf16", "fp16", "fp32", *FLOAT8_RECIPES)


def _auto_off_or_positive(text: str) -> float | str:
    if text.lower() == AUTO:
        return AUTO
    # YAML reads `off` as false, and a loss times 0 is no loss.
    return OFF if text.lower() in (OFF, "false", "no") else non_negative(text) or OFF


@dataclass(frozen=True)
class PrecisionOptions:
    """The options of dtypes and of additions to the loss, which affect the result."""

    z_loss: float = option(
        0.0,
        group="optimizer",
        role=Role.RESULT,
        quiet=True,
        parse=non_negative,
        help="add X times the mean of (log-sum-exp of the logits)² over the label tokens to the "
        "loss that is trained, so that logits do not grow; typical is 1e-4. train/loss and "
        "eval/loss remain the cross entropy (default: 0, off)",
    )
    router_aux_loss: float | str = option(
        AUTO,
        group="optimizer",
        role=Role.RESULT,
        quiet=(AUTO, OFF),
        parse=_auto_off_or_positive,
        metavar="auto|off|X",
        help="mixture-of-experts models: coefficient of the load-balancing loss, or for families "
        "with sigmoid routers the update rate of their biases. auto: the family's value when "
        "training from scratch; in fine-tuning, only if the model's config sets "
        "output_router_logits (default: auto)",
    )
    precision: str = option(
        None,
        "--mixed-precision",
        role=Role.RESULT,
        choices=_PRECISIONS,
        nargs="?",
        parse=or_switch(None, "fp32", options.dtype(*_PRECISIONS)),
        help="compute dtype (bfloat16, float16 and float32 are accepted too; without a value, the "
        "default); master weights stay float32. fp8: bf16, with the linear layers of the blocks "
        "in 8 bits, one scale per tensor, on Ada GPUs or newer. fp8-rowwise: one scale per row, "
        "which rounds less and is slower (default: bf16 if the hardware supports it, else fp32)",
    )


@dataclass(frozen=True)
class DeviceOptions:
    """The options of the device, and of what a step recomputes to save its memory."""

    device: str = option(
        "auto",
        group="speed and memory (no effect on the result, up to rounding)",
        role=Role.ALIKE,
        choices=("auto", "cpu"),
        help="auto: the GPUs of this machine, or its CPU if there are none; GPUs that torch cannot "
        "use are an error. cpu: the CPU, even if there are GPUs",
    )
    activation_checkpointing: str = option(
        AUTO,
        aliases=("gradient_checkpointing",),
        role=Role.ALIKE,
        parse=or_switch("full", "none"),
        nargs="?",
        const="full",
        choices=(AUTO, *RECOMPUTATIONS),
        help="activations to recompute in the backward pass: none, selective (cheap operations) or "
        "full (whole blocks). auto: the least that fits in memory; a resumed run does not go below "
        "its earlier value. The option without a value means full",
    )
    activation_offload: bool = option(
        False,
        role=Role.ALIKE,
        parse=on_off,
        help="on GPUs: keep the inputs of the blocks, which are all that full activation "
        "checkpointing keeps, in page-locked host memory between forward and backward pass. They "
        "are copied while blocks compute. For long sequences; implies "
        "--activation-checkpointing full",
    )


@dataclass(frozen=True)
class ParallelOptions:
    """The options of how the ranks compute a step."""

    deterministic: bool = option(
        False,
        group="speed and memory (no effect on the result, up to rounding)",
        role=Role.ALIKE,
        parse=on_off,
        help="on GPUs: bitwise identical results across runs and resumes; attention is slower",
    )
    attention: str = option(
        "auto",
        aliases=("attn_implementation", "use_flash_attn"),
        role=Role.ALIKE,
        parse=or_switch("flash", "auto"),
        nargs="?",
        const="flash",
        choices=("auto", "flash", "sdpa", "varlen", "flash_attention_2", "flex"),
        help="attention implementation. auto: varlen for packed documents on a GPU, else sdpa. "
        "flash: flash_attention_2 if its package is installed and supports training here, else "
        "auto. The option without a value means flash",
    )
    cpu_offload: bool = option(
        False,
        role=Role.ALIKE,
        parse=on_off,
        help="keep the sharded weights and optimizer state in host memory, which is slower",
    )
    shard_size: int | None = option(
        None,
        role=Role.ALIKE,
        parse=positive_int,
        help="ranks that share one replica of the model (HSDP), such as the GPUs of a node "
        "(default: all ranks; with four or more nodes, the ranks of one node, if a step fits in "
        "memory)",
    )
    context_parallel: int = option(
        1,
        aliases=("context_parallel_size", "parallelism.context_parallel_degree"),
        role=Role.ALIKE,
        parse=positive_int,
        help="divide each row of --seq-length tokens over N neighbouring ranks, for rows that are "
        "too long for one GPU; they exchange tokens around attention, so keep N within a node",
    )
    context_parallel_method: str = option(
        AUTO,
        role=Role.ALIKE,
        choices=(AUTO, ULYSSES, ALLGATHER),
        help="what the ranks of --context-parallel exchange. ulysses: tokens for heads, for which "
        "N has to divide the attention heads. allgather: keys and values. auto: ulysses if N does",
    )
