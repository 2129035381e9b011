"""Declare the options of memory and time estimates, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from lib.core import options
from lib.core.declared import Role, option
from lib.core.options import positive


@dataclass(frozen=True)
class PlanOptions:
    """The options of memory and time estimates."""

    plan_only_warn: bool = option(
        False,
        group="measuring and planning",
        role=Role.LOCAL,
        help="start the run even if the memory estimate says that it does not fit, and only warn",
    )
    plan_gpus: list[int] | None = option(
        None,
        role=Role.LOCAL,
        parse=options.parse_counts,
        metavar="N,N,…",
        help="with --dry-run: print the memory per GPU on N GPUs, for each kind of activation "
        "checkpointing and several batch sizes (default: print only the memory of weights and "
        "optimizer state, for the ranks of this launch)",
    )
    plan_gpu_memory: float = option(
        80.0,
        role=Role.LOCAL,
        parse=positive,
        metavar="GIB",
        help="with --plan-gpus: memory of each GPU, in GiB",
    )
