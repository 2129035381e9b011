"""Declare the options of memory and time estimates, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lib.core import options
from lib.core.declared import Role, option


class PlannedGpus(NamedTuple):
    """The GPUs of a plan. counts: numbers of GPUs; gib: memory of each GPU."""

    counts: list[int]
    gib: float = 80.0


def parse_planned_gpus(text: str) -> PlannedGpus:
    """Parse `8,64`, or `8,64:141` with the memory of each GPU in GiB."""
    counts, colon, gib = text.partition(":")
    return PlannedGpus(options.parse_counts(counts), *([options.positive(gib)] if colon else []))


options.JOINED[parse_planned_gpus] = ","


@dataclass(frozen=True)
class PlanOptions:
    """The options of memory and time estimates."""

    plan_only_warn: bool = option(
        False,
        group="measuring and planning",
        role=Role.LOCAL,
        help="start the run even if the memory estimate says that it does not fit, and only warn",
    )
    plan_gpus: PlannedGpus | None = option(
        None,
        role=Role.LOCAL,
        parse=parse_planned_gpus,
        metavar="N,N,…[:GIB]",
        help="with --dry-run: print the memory per GPU on N GPUs, for each kind of activation "
        "checkpointing and several batch sizes. GIB: memory of each GPU, 80 without it (default: "
        "print only the memory of weights and optimizer state, for the ranks of this launch)",
    )
