"""Read a trace of the profiler: kernels, who launched them, and exposed communication.

Times are microseconds, as in the trace.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.gpu.place import Stage

_LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = dict[str, Any]


def load(run: Stage) -> list[Event]:
    """Return the events that rank 0 recorded."""
    path = next((run.experiment / "profile").glob("rank_00000*.json.gz"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def kernels(events: Iterable[Event]) -> list[Event]:
    """Return the kernels that ran on a GPU."""
    return [event for event in events if event.get("cat") == "kernel"]


def milliseconds(events: Iterable[Event]) -> float:
    """Return how long events took together."""
    return sum(event["dur"] for event in events) / 1000


def dearest(events: Iterable[Event], count: int = 15) -> dict[str, float]:
    """Return the milliseconds of the kernels that took longest, by name."""
    spent = Counter[str]()
    for event in kernels(events):
        spent[event["name"][:100]] += event["dur"]
    return {name: round(taken / 1000, 3) for name, taken in spent.most_common(count)}


def launched_within(events: list[Event], annotation: str) -> list[Event]:
    """Return the kernels that the host launched within ranges whose name begins with `name`."""
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
        event for event in kernels(events) if event.get("args", {}).get("correlation") in launched
    ]


def communication(events: Iterable[Event]) -> tuple[float, float]:
    """Return the milliseconds of NCCL's kernels, and those in which no other kernel runs.

    The second are exposed: the GPU waits for other ranks.
    """
    nccl = []
    others = []
    for event in kernels(events):
        spans = nccl if "nccl" in event["name"].lower() else others
        spans.append((event["ts"], event["ts"] + event["dur"]))
    busy = _union(nccl)
    beside = _union(others)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other))
        for begin, end in busy
        for other, other_end in beside
        if other < end and other_end > begin
    )
    total = sum(end - begin for begin, end in busy)
    return total / 1000, (total - both) / 1000


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
