"""Read a profiler trace: kernels, the ranges that launched them, and exposed communication.

Times in events are microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.gpu.place import Stage

_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Parts of a step, with the ranges that launch their kernels. The first one that fits counts.
_PARTS = {
    "update": ("Optimizer.step",),
    "FSDP": ("FSDP::",),
    "products in 8 bits": ("aten::_scaled_mm",),
    "products in 16 bits": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
    "attention": (
        *("aten::_scaled_dot_product", "aten::_cudnn_attention", "aten::_flash_attention"),
        *("aten::_efficient_attention", "torch_attn::", "flash_attn"),
    ),
}
CASTS = "casts and scales"  # kernels of the compiler; its names list the operations in a kernel
_CAST = re.compile(r"triton_.*(_abs_|_amax_|_clamp_)")
Event = dict[str, Any]


def load_trace(run: Stage) -> list[Event]:
    """Return the events in the trace of rank 0."""
    path = next((run.experiment / "profile").glob("rank_00000*.json.gz"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def find_kernels(events: Iterable[Event]) -> list[Event]:
    """Return the kernels that ran on a GPU."""
    return [event for event in events if event.get("cat") == "kernel"]


def sum_milliseconds(events: Iterable[Event]) -> float:
    """Return the sum of the durations of events."""
    return sum(event["dur"] for event in events) / 1000


def find_slowest(events: Iterable[Event], count: int = 15) -> dict[str, float]:
    """Return the milliseconds of the kernels that took longest in total, by name."""
    microseconds = Counter[str]()
    for event in find_kernels(events):
        microseconds[event["name"][:100]] += event["dur"]
    return {name: round(total / 1000, 3) for name, total in microseconds.most_common(count)}


def find_launched_kernels(events: list[Event], annotation: str) -> list[Event]:
    """Return the kernels launched within the ranges whose name begins with `annotation`."""
    ranges = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("user_annotation", "cpu_op")
        and event["name"].startswith(annotation)
    ]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in _LAUNCHES
        and "correlation" in event.get("args", {})
        and any(begin <= event["ts"] <= end for begin, end in ranges)
    }
    return [
        event
        for event in find_kernels(events)
        if event.get("args", {}).get("correlation") in launched
    ]


def sum_by_part(events: list[Event]) -> dict[str, float]:
    """Return the milliseconds of the kernels of each part of a step; "rest" are all others.

    A kernel that casts and also computes something else counts as a cast.
    """
    part_of = {
        event["args"]["correlation"]: part
        for part, annotations in reversed(_PARTS.items())
        for annotation in annotations
        for event in find_launched_kernels(events, annotation)
    }
    sums = dict.fromkeys((*_PARTS, CASTS, "rest"), 0.0)
    for event in find_kernels(events):
        other = CASTS if _CAST.match(event["name"]) else "rest"
        part = part_of.get(event.get("args", {}).get("correlation"), other)
        sums[part] += event["dur"] / 1000
    return sums


def measure_communication(events: Iterable[Event]) -> tuple[float, float]:
    """Return the milliseconds of NCCL's kernels, and the exposed part of them.

    Exposed is the time in which no other kernel runs: the GPU waits for other ranks.
    """
    nccl = []
    others = []
    for event in find_kernels(events):
        spans = nccl if "nccl" in event["name"].lower() else others
        spans.append((event["ts"], event["ts"] + event["dur"]))
    nccl_spans = _merge_spans(nccl)
    other_spans = _merge_spans(others)
    overlap = sum(
        max(0.0, min(nccl_end, other_end) - max(nccl_begin, other_begin))
        for nccl_begin, nccl_end in nccl_spans
        for other_begin, other_end in other_spans
        if other_begin < nccl_end and other_end > nccl_begin
    )
    total = sum(nccl_end - nccl_begin for nccl_begin, nccl_end in nccl_spans)
    return total / 1000, (total - overlap) / 1000


def _merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans without overlaps, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
