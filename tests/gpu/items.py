"""The items, the most important first, each with its estimated seconds on an H200.

If GPU time is limited: `--call N` runs the items whose `call` is N in under ten minutes. Calls 6
and 7 need two GPUs or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.gpu import (
    adapters,
    attention,
    block,
    costs,
    eight_ranks,
    experts,
    float8,
    kernels,
    memory,
    ready,
    runs,
    several,
    speed,
)
from tests.gpu.place import Place

BESIDE = 3.0  # how much faster items run beside each other than one after the other
CALL_S = 500.0  # estimated seconds that the items of a call may take, of its ten minutes
SINGLE = range(1, 6)  # the calls for one GPU


class Item(NamedTuple):
    """One item of the kit.

    run: raises AssertionError if something is wrong, NotHere if something is missing. command: of
    benchmarks/gpu.py, and of the file that the result goes to. estimate: seconds. alone: it
    measures time, or takes most of the memory or the disk. gpus: how many it needs.
    """

    name: str
    run: Callable[[Place], None]
    command: str
    call: int
    estimate: int
    alone: bool = True
    gpus: int = 1

    @property
    def limit(self) -> int:
        """Return the seconds after which it is killed."""
        return 2 * self.estimate + 30


def _check(
    run: Callable[[Place], None], call: int, estimate: int, alone: bool = False, gpus: int = 1
) -> Item:
    return Item(run.__name__, run, "correctness", call, estimate, alone, gpus)


def _mfu(model: str, length: int, batch: int, compiled: str, call: int, estimate: int) -> Item:
    return Item(
        speed.mfu_name(model, length, batch, compiled),
        speed.mfu(model, length, batch, compiled),
        "mfu",
        call,
        estimate,
    )


def _cost(
    run: Callable[[Place], None], call: int, estimate: int, command: str = "rest", gpus: int = 1
) -> Item:
    return Item(run.__name__, run, command, call, estimate, True, gpus)


ITEMS = [
    _check(ready.ready, 1, 15, alone=True),
    _check(runs.a_run, 1, 55),
    _check(kernels.varlen, 1, 20),
    _check(kernels.loss_head, 1, 45),
    _check(block.block, 1, 80),
    _check(experts.experts, 1, 120),
    _check(adapters.adapters, 1, 180, alone=True),
    _mfu("8b-wide", 8192, 2, "on", 1, 55),
    _mfu("8b-wide", 8192, 2, "off", 1, 30),
    _cost(speed.profile, 1, 75, "mfu"),
    _cost(float8.fp8, 2, 115),
    _cost(costs.packed, 2, 120),
    _mfu("1b", 8192, 2, "on", 2, 50),
    _mfu("8b-wide", 8192, 4, "on", 2, 65),
    _mfu("1b", 8192, 4, "on", 2, 55),
    _cost(speed.whole_run, 2, 85, "mfu"),
    _check(runs.resume, 3, 150),
    _check(memory.memory, 3, 150),
    _check(float8.fp8_states, 3, 220),
    _check(runs.recomputation, 3, 110),
    _check(runs.host_syncs, 3, 80),
    _check(runs.graphs, 3, 80),
    _check(runs.graphs_gemma, 3, 110),
    _check(adapters.adapters_resume, 3, 90),
    _check(runs.save_under_load, 3, 90),
    _check(experts.experts_wait, 3, 50),
    _check(kernels.peaks, 3, 15, alone=True),
    _cost(attention.attention, 3, 30),
    _cost(attention.boundaries, 3, 30),
    _check(runs.export, 4, 30),
    _check(runs.chat, 4, 25),
    _check(kernels.staging, 4, 20),
    _check(runs.saves, 4, 25),
    _check(memory.leak, 4, 30),
    _check(kernels.bad_steps, 4, 20),
    _check(kernels.gradient_scale, 4, 15),
    _check(memory.allocator, 4, 10),
    _check(memory.out_of_memory, 4, 15),
    _check(float8.fp8_loss, 4, 100),
    _check(runs.documents_in_fp32, 4, 10),
    _check(runs.watchdog, 4, 30),
    _check(runs.launcher, 4, 40),
    _check(runs.half_precision, 4, 30),
    _check(runs.offload, 4, 45),
    _cost(adapters.adapter_speed, 4, 125),
    _cost(costs.optimizers, 4, 85),
    _cost(experts.experts_speed, 4, 60),
    _cost(speed.save_stall, 5, 70),
    _cost(costs.batch_auto, 5, 100),
    _cost(costs.log_rows, 5, 55),
    _cost(costs.offload_speed, 5, 50),
    _cost(eight_ranks.eight_ranks, 5, 50),
    _mfu("8b-wide", 4096, 4, "on", 5, 45),
    _cost(speed.first_step, 5, 90),
    _check(several.collectives, 6, 120, alone=True, gpus=2),
    _check(several.saving_threads, 6, 60, alone=True, gpus=2),
    _check(several.late_rank, 6, 60, alone=True, gpus=2),
    _cost(several.gathering, 6, 200, gpus=2),
    _cost(several.communication, 7, 150, gpus=2),
    _cost(several.scaling, 7, 320, gpus=2),
]


def find_item(name: str) -> Item:
    """Return the item with this name; StopIteration if there is none."""
    return next(item for item in ITEMS if item.name == name)


def select(commands: Sequence[str], only: str = "", call: int | None = None) -> list[Item]:
    """Return the items of some commands in their order; only: those that it names, by commas.

    Raises ValueError for names and calls that do not exist.
    """
    names = set(filter(None, only.split(",")))
    if unknown := names - {item.name for item in ITEMS}:
        raise ValueError(f"no item is called {', '.join(sorted(unknown))}")
    if call is not None and call not in (calls := sorted({item.call for item in ITEMS})):
        raise ValueError(f"there is no call {call}, only {', '.join(map(str, calls))}")
    return [
        item
        for item in ITEMS
        if item.command in commands
        and (not names or item.name in names)
        and call in (None, item.call)
    ]


def estimate(items: Sequence[Item]) -> float:
    """Return the seconds that items take together, some of them beside each other."""
    alone = sum(item.estimate for item in items if item.alone)
    beside = [item.estimate for item in items if not item.alone]
    return alone + max([sum(beside) / BESIDE, *beside], default=0)


def calls_table() -> str:
    """Return the calls with their items and estimated seconds, as a table of Markdown."""
    lines = ["| command | items | seconds, estimated |", "|---|---|---|"]
    for call in sorted({item.call for item in ITEMS}):
        items = [item for item in ITEMS if item.call == call]
        names = ", ".join(f"`{item.name}` {item.estimate}" for item in items)
        lines.append(
            f"| `python benchmarks/gpu.py --call {call}` | {names} | {estimate(items):.0f} |"
        )
    return "\n".join(lines)
