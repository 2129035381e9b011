"""Measure the share of communication in some steps, with torch's profiler.

On a GPU, a collective is a kernel of NCCL, which also waits for the slowest rank. On a CPU, it is
an operation of gloo, from its start to its end. Everything else on the device (other kernels and
copies; on a CPU the operators of torch) counts as computation. The share that no computation
overlaps is the time that a step would save if communication took no time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lib.core import log
from lib.parallel.layout import ParallelLayout

Span = tuple[float, float]  # start and end
_NCCL = "nccl"
_GLOO = "gloo:"
_OPERATOR = "aten::"


class Communication(NamedTuple):
    """Contains the share of communication in the time of a step, as a mean over all ranks.

    total: share of the time with a running collective. exposed: share of the time with a running
    collective and no computation.
    """

    total: float
    exposed: float


class CommunicationProfiler:
    """Profiles the steps after `after`, up to `last`, and computes the share of communication.

    This replaces the `Profiler` of a run. All ranks must use it in the same way. result: None if
    nothing was measured. problem: why not. source: a text about the measured events.
    """

    def __init__(self, after: int, last: int, layout: ParallelLayout) -> None:
        self._first = after + 1
        self._last = last
        self._layout = layout
        self._recording: profile | None = None
        self._began = 0.0
        self.result: Communication | None = None
        self.problem = "" if layout.ranks > 1 else "one rank has no communication"
        kind = "kernels of NCCL" if layout.device.type == "cuda" else "operations of gloo"
        self.source = f"{kind}, mean of {layout.ranks} ranks over {last - after} further steps"

    def begin_step(self, step: int) -> None:
        """Start the profiler before the first of the steps."""
        if step != self._first or self._layout.ranks == 1:
            return
        on_gpu = self._layout.device.type == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        try:
            self._recording = profile(activities=[activity])
            self._recording.start()
        except Exception as error:  # the bench continues without this figure
            self._fail(error)
        self._wait_for_device()
        self._began = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Compute the result after the last of the steps. All ranks must call this."""
        if step != self._last or self._layout.ranks == 1:
            return
        self._wait_for_device()
        seconds = time.perf_counter() - self._began
        local = Communication(math.nan, math.nan)
        if self._recording is not None:
            try:
                self._recording.stop()
                local = compute_communication(self._recording.events(), seconds * 1e6)
            except Exception as error:
                self._fail(error)
        means = self._layout.gather_table([*local]).mean(0).tolist()
        if math.isnan(means[0]):
            self.problem = self.problem or "the profiler failed on another rank"
        else:
            self.result = Communication(*means)

    def _wait_for_device(self) -> None:
        if self._layout.device.type == "cuda":
            torch.cuda.synchronize(self._layout.device)

    def _fail(self, error: Exception) -> None:
        self._recording = None
        self.problem = f"the profiler failed: {error}".splitlines()[0]
        log.warn(self.problem)


def compute_communication(events: Sequence[FunctionEvent], duration: float) -> Communication:
    """Return the share of communication of one rank. duration: of all steps, in microseconds.

    Raises RuntimeError if there is no collective: several ranks always run some, so the profiler
    has missed them (another profiler may use the GPU).
    """
    collectives: list[Span] = []
    computations: list[Span] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CPU:
            if event.name.startswith(_GLOO):
                collectives.append(span)
            elif event.name.startswith(_OPERATOR):
                computations.append(span)
        elif not event.is_user_annotation:
            (collectives if event.name.startswith(_NCCL) else computations).append(span)
    if not collectives:
        raise RuntimeError("it recorded no collective")
    total = measure_union(collectives)
    overlapped = total + measure_union(computations) - measure_union(collectives + computations)
    return Communication(total / duration, (total - overlapped) / duration)


def measure_union(spans: Sequence[Span]) -> float:
    """Return the length of the union of some spans."""
    length = 0.0
    reached = -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
