"""Declare the options of optimizer, schedule and guard, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from lib.core.declared import Role, option, with_options_of
from lib.core.options import count, factor, non_negative
from lib.optim import optimizers, schedule

_LARGEST_DEFAULT_LR = max(spec.small_lr for spec in optimizers.OPTIMIZERS.values())


@dataclass(frozen=True)
@with_options_of(*optimizers.list_option_classes(), after="lr_scheduler")
class OptimizerOptions:
    """The optimizer, its options and the learning rate schedule."""

    optimizer: str = option(
        optimizers.DEFAULT,
        group="optimizer",
        role=Role.RESULT,
        quiet=True,
        choices=tuple(optimizers.OPTIMIZERS),
        help=f"optimizer; {optimizers.describe_choices()}",
    )
    lr: float = option(
        None,
        "--max-lr",
        aliases=("learning_rate", "optimizer.lr"),
        role=Role.RESULT,
        parse=non_negative,
        first="peak learning rate",
        help="peak learning rate: 3e-5 unless typed, 3e-4 with LoRA; from scratch 3e-4, or "
        f"{optimizers.describe_small_lrs()} below 50 million parameters (default: by model, "
        f"3e-5 to {optimizers.write_rate(_LARGEST_DEFAULT_LR)})",
    )
    min_lr: float = option(
        None,
        role=Role.RESULT,
        parse=non_negative,
        help="learning rate at the last step (default: a tenth of the peak)",
    )
    warmup_steps: int | None = option(
        None,
        aliases=("lr_scheduler.warmup_steps",),
        role=Role.RESULT,
        parse=count,
        help="steps of linear warm-up (default: 5 %% of all steps, at most 1000)",
    )
    lr_scheduler: str = option(
        "cosine",
        aliases=("lr_scheduler_type",),
        role=Role.RESULT,
        metavar="KIND",
        parse=schedule.parse_kind,
        help="learning rate schedule: cosine, linear, constant or wsd (constant, then decay over "
        "the last fifth of the steps after warm-up). wsd:SHARE:SHAPE sets the share of these steps "
        "and the shape of the decay: linear, cosine or sqrt, as in wsd:0.4:sqrt",
    )


@dataclass(frozen=True)
class GuardOptions:
    """The options of clipping gradients and skipping harmful steps."""

    grad_clip: float = option(
        1.0,
        aliases=("max_grad_norm", "training.max_norm"),
        group="optimizer",
        role=Role.RESULT,
        parse=non_negative,
        help="maximum global norm of the gradients; 0: no clipping",
    )
    spike_factor: float = option(
        30.0,
        role=Role.RESULT,
        parse=factor,
        help="skip the update of a step if its gradient norm exceeds X times the running mean of "
        "100 steps; 0: never. Steps with NaN or infinite gradients are always skipped. After 20 "
        "skipped steps in a row, the run returns to the last checkpoint and skips their data, at "
        "most three times",
    )
