"""Measure the bandwidth between all ranks, the ranks of each node, and each pair of nodes.

Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): bytes / time, times 2(n-1)/n for an
all-reduce and (n-1)/n for an all-gather over n ranks. For any n it is the speed of the slowest
link.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from launch.checks.ranks import AllRanks, make_process_group

_GPU_BYTES = 256 << 20
_CPU_BYTES = 4 << 20
_GPU_REPEATS = 10
_CPU_REPEATS = 6
# torch 2.13 renamed this function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Result = dict[str, Any]


def measure_compute(launch: AllRanks) -> float:
    """Return the TFLOP/s of this rank's matrix products (bf16 on a GPU, fp32 on a CPU)."""
    width, dtype = (8192, torch.bfloat16) if launch.on_gpu else (384, torch.float32)
    matrix = torch.ones(width, width, dtype=dtype, device=launch.device)
    seconds = [_time_operation(lambda: matrix @ matrix, launch) for _ in range(20)]
    return 2 * width**3 / min(seconds[2:]) / 1e12


def measure_speeds(launch: AllRanks, deadline: float) -> Result:
    """Return the speeds of all ranks, each node and each pair of nodes; all ranks must call this.

    deadline: `time.monotonic()` of rank 0 after which no further round of pairs begins.
    The result has the keys `world`, `nodes[node]` and `pairs["a-b"]`, each with `all_reduce` and
    `all_gather` in GB/s and `latency_us`, or with `error`. It is empty on ranks other than 0.
    """
    pairs, skipped_rounds = _measure_pairs(launch, deadline)
    ranks_by_node = {
        node: ranks
        for node, ranks in sorted(launch.ranks_of.items())
        if len(launch.ranks_of) > 1 and len(ranks) > 1
    }
    if launch.node in ranks_by_node:
        _measure_group(launch, f"node-{launch.node}", ranks_by_node[launch.node], launch.timeout_s)
    nodes = {
        node: _collect_result(launch, f"node-{node}", ranks)
        for node, ranks in ranks_by_node.items()
        if launch.rank == 0
    }
    everyone = list(range(launch.world_size))
    is_connected = launch.decide(
        "all-pairs-talk", not any("error" in pair for pair in pairs.values())
    )
    if is_connected:
        _measure_group(launch, "world", everyone, launch.timeout_s)
    if launch.rank != 0:
        return {}
    world = (
        _collect_result(launch, "world", everyone)
        if is_connected
        else {"error": "not measured, since some nodes cannot reach each other"}
    )
    return {"world": world, "nodes": nodes, "pairs": pairs, "rounds_left_out": skipped_rounds}


def pair_rounds(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs of nodes in rounds with at most one pair per node (a round robin)."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append(
            [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        )
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _measure_pairs(launch: AllRanks, deadline: float) -> tuple[dict[str, Result], int]:
    """Measure pairs round by round; return the results (on rank 0) and the skipped rounds."""
    results: dict[str, Result] = {}
    rounds = pair_rounds(sorted(launch.ranks_of))
    for number, pairs in enumerate(rounds):
        if not launch.decide(f"round-{number}", time.monotonic() < deadline):
            return results, len(rounds) - number
        members = {
            pair: sorted(launch.ranks_of[pair[0]] + launch.ranks_of[pair[1]]) for pair in pairs
        }
        for (a, b), ranks in members.items():
            if launch.node in (a, b):
                _measure_group(launch, f"pair-{a}-{b}", ranks, launch.timeout_s / 2)
        if launch.rank == 0:
            results |= {
                f"{a}-{b}": _collect_result(launch, f"pair-{a}-{b}", ranks)
                for (a, b), ranks in members.items()
            }
    return results, 0


def _measure_group(launch: AllRanks, name: str, ranks: list[int], timeout_s: float) -> None:
    """Measure a group of ranks and share the result or the error."""
    try:
        with make_process_group(launch, name, ranks, timeout_s):
            result = _measure_group_speed(launch, len(ranks))
    except (dist.DistError, RuntimeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = re.sub(r"\[[^ ]*\]\s*", "", first_line)
        result = {"error": reason.strip()[:300]}
    launch.share(name, result)


def _collect_result(launch: AllRanks, name: str, ranks: list[int]) -> Result:
    """Return the result of a group's first rank, or the first error of any of its ranks."""
    results = launch.gather(name, ranks)
    if len(results) < len(ranks):
        return {"error": f"no answer from ranks {sorted(set(ranks) - set(results))}"}
    failures = [view for view in results.values() if "error" in view]
    return failures[0] if failures else results[ranks[0]]


def _measure_group_speed(launch: AllRanks, ranks: int) -> Result:
    size, repeats = (_GPU_BYTES, _GPU_REPEATS) if launch.on_gpu else (_CPU_BYTES, _CPU_REPEATS)
    elements = size // 4 // ranks * ranks
    buffer = torch.ones(elements, device=launch.device)
    part = torch.ones(elements // ranks, device=launch.device)
    tiny = torch.ones(1, device=launch.device)

    def time_slowest_rank(operation: Callable[[], Any], times: int) -> float:
        """Return the least seconds of an operation on the slowest rank, after a warm-up."""
        _time_operation(operation, launch)
        dist.barrier()
        least = min(_time_operation(operation, launch) for _ in range(times))
        seconds = torch.tensor([least], device=launch.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    reduce_s = time_slowest_rank(lambda: dist.all_reduce(buffer), repeats)
    gather_s = time_slowest_rank(lambda: _all_gather(buffer, part), repeats)
    gigabytes = 4e-9 * elements
    return {
        "all_reduce": 2 * (ranks - 1) / ranks * gigabytes / reduce_s,
        "all_gather": (ranks - 1) / ranks * gigabytes / gather_s,
        "latency_us": 1e6 * time_slowest_rank(lambda: dist.all_reduce(tiny), 20),
    }


def _time_operation(operation: Callable[[], Any], launch: AllRanks) -> float:
    if launch.on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    operation()
    if launch.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
