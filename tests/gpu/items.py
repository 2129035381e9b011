"""List the items, the most important first, with the seconds that they took on one H200.

Seconds of items that have not run there yet are estimates. If GPU time is limited, `--call N` runs
the items whose `call` is N in less than ten minutes. Calls 6, 7 and 10 need two GPUs or more.
Items of one call can use each other's figures (`measure_or_reuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.gpu import (
    adapters,
    attention,
    block,
    context,
    costs,
    eight_ranks,
    experts,
    float8,
    kernels,
    memory,
    peers,
    ready,
    runs,
    several,
    speed,
)
from tests.gpu.place import Place

START_S = 18.0  # from the command to the first item
PARALLEL_SPEEDUP = 3.0  # of items that run at the same time, relative to one after the other
CALL_S = 520.0  # limit of the estimate for a call; it must end within ten minutes
SINGLE_GPU_CALLS = range(1, 6)  # the calls for one GPU
EXTRA_CALL = 8  # for one GPU too, but beyond the time that the others take together
LONG_ROWS_CALL = 9  # the same, with items about long sequences


class Item(NamedTuple):
    """One item of the kit.

    run: raises AssertionError if something is wrong, NotHere if something is missing. command: the
    command of benchmarks/gpu.py that runs the item, and the name of the file with its result.
    estimate: seconds. alone: nothing may run at the same time, since the item measures time or
    needs most of the memory or the disk. gpus: the number of GPUs that it needs.
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
        """Return the seconds after which the item is killed."""
        return 2 * self.estimate + 30


def _correctness_item(
    run: Callable[[Place], None], call: int, estimate: int, alone: bool = False, gpus: int = 1
) -> Item:
    return Item(run.__name__, run, "correctness", call, estimate, alone, gpus)


def _mfu_item(model: str, length: int, batch: int, compiled: str, call: int, estimate: int) -> Item:
    return Item(
        speed.name_mfu_item(model, length, batch, compiled),
        speed.make_mfu_item(model, length, batch, compiled),
        "mfu",
        call,
        estimate,
    )


def _measurement_item(
    run: Callable[[Place], None], call: int, estimate: int, command: str = "rest", gpus: int = 1
) -> Item:
    return Item(run.__name__, run, command, call, estimate, True, gpus)


ITEMS = [
    _correctness_item(ready.ready, 1, 8, alone=True),
    _correctness_item(runs.a_run, 1, 19),
    _correctness_item(kernels.varlen, 1, 2),
    _correctness_item(kernels.loss_head, 1, 9),
    _correctness_item(block.block, 1, 40),
    _correctness_item(experts.experts, 1, 75),
    _mfu_item("8b-wide", 8192, 2, "on", 1, 24),
    _mfu_item("8b-wide", 8192, 2, "off", 1, 17),
    _measurement_item(speed.profile, 1, 40, "mfu"),
    _measurement_item(peers.peers, 1, 130),
    _measurement_item(adapters.adapter_speed, 1, 53),
    _measurement_item(peers.peers_adapters, 1, 30),
    _measurement_item(float8.fp8, 1, 103),
    _correctness_item(adapters.adapters, 2, 146, alone=True),
    _mfu_item("1b", 8192, 2, "on", 2, 16),
    _mfu_item("8b-wide", 8192, 4, "on", 2, 34),
    _mfu_item("1b", 8192, 4, "on", 2, 27),
    _measurement_item(costs.packed, 2, 65),
    _measurement_item(peers.peers_packed, 2, 75),
    _measurement_item(peers.peers_1b, 2, 70),
    _measurement_item(speed.bench, 2, 41),
    _correctness_item(runs.resume, 3, 73),
    _correctness_item(memory.memory, 3, 126),
    _correctness_item(float8.fp8_states, 3, 150),
    _correctness_item(runs.recomputation, 3, 43),
    _correctness_item(runs.host_syncs, 3, 29),
    _correctness_item(runs.graphs, 3, 17),
    _correctness_item(runs.graphs_gemma, 3, 63),
    _correctness_item(adapters.adapters_resume, 3, 43),
    _correctness_item(runs.save_under_load, 3, 115),
    _correctness_item(experts.experts_wait, 3, 19),
    _correctness_item(kernels.peaks, 3, 1, alone=True),
    _measurement_item(attention.attention, 3, 70),
    _measurement_item(attention.boundaries, EXTRA_CALL, 30),
    _measurement_item(experts.experts_speed, 3, 35),
    _measurement_item(peers.peers_experts, 3, 85),
    _correctness_item(runs.export, 4, 12),
    _correctness_item(runs.chat, 4, 37),
    _correctness_item(kernels.staging, 4, 5),
    _correctness_item(runs.saves, 4, 15),
    _correctness_item(memory.leak, 4, 28),
    _correctness_item(kernels.bad_steps, 4, 7),
    _correctness_item(kernels.gradient_scale, 4, 4),
    _correctness_item(memory.allocator, 4, 6),
    _correctness_item(memory.out_of_memory, 4, 3),
    _correctness_item(float8.fp8_loss, 4, 95),
    _correctness_item(runs.documents_in_fp32, 4, 9),
    _correctness_item(runs.watchdog, 4, 17),
    _correctness_item(runs.launcher, 4, 22),
    _correctness_item(runs.half_precision, 4, 15),
    _correctness_item(runs.offload, 4, 45),
    _measurement_item(costs.log_rows, 4, 34),
    _measurement_item(eight_ranks.eight_ranks, 4, 45),
    _measurement_item(speed.whole_run, 4, 121, "mfu"),
    _measurement_item(speed.save_stall, 5, 63),
    _measurement_item(costs.batch_auto, 5, 76),
    _measurement_item(costs.optimizers, EXTRA_CALL, 70),
    _measurement_item(costs.offload_speed, 5, 31),
    _measurement_item(costs.activation_offload, LONG_ROWS_CALL, 90),
    _measurement_item(context.context, LONG_ROWS_CALL, 150),
    _mfu_item("8b-wide", 4096, 4, "on", 5, 24),
    _measurement_item(speed.first_step, 5, 136),
    _correctness_item(several.collectives, 6, 210, alone=True, gpus=2),
    _correctness_item(several.saving_threads, 6, 60, alone=True, gpus=2),
    _correctness_item(several.late_rank, 6, 60, alone=True, gpus=2),
    _measurement_item(several.bench_shares, 6, 50, gpus=2),
    _measurement_item(several.communication, 7, 150, gpus=2),
    _measurement_item(several.scaling, 7, 320, gpus=2),
    _correctness_item(context.context_ranks, 10, 420, alone=True, gpus=2),
    _measurement_item(peers.peers_slow, EXTRA_CALL, 400),
]


def find_item(name: str) -> Item:
    """Return the item with this name. Raises StopIteration if there is none."""
    return next(item for item in ITEMS if item.name == name)


def select_items(commands: Sequence[str], only: str = "", call: int | None = None) -> list[Item]:
    """Return the chosen items, in the order of ITEMS.

    only: names of items, separated by commas; "" for all. Raises ValueError for a name or a call
    that does not exist.
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


def estimate_seconds(items: Sequence[Item]) -> float:
    """Return the seconds of a call with these items; those that need not run alone overlap."""
    alone_s = sum(item.estimate for item in items if item.alone)
    overlapping = [item.estimate for item in items if not item.alone]
    return START_S + alone_s + max([sum(overlapping) / PARALLEL_SPEEDUP, *overlapping], default=0)


def format_calls() -> str:
    """Return a Markdown table of the calls with their items and seconds."""
    lines = ["| command | items | seconds |", "|---|---|---|"]
    for call in sorted({item.call for item in ITEMS}):
        items = [item for item in ITEMS if item.call == call]
        names = ", ".join(f"`{item.name}` {item.estimate}" for item in items)
        seconds = estimate_seconds(items)
        lines.append(f"| `python benchmarks/gpu.py --call {call}` | {names} | {seconds:.0f} |")
    return "\n".join(lines)
