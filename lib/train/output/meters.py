"""Measure the steps of a run: time, memory, and every operation of the profiled steps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from lib.core import log
from lib.core.paths import Experiment
from lib.core.watchdog import Watchdog
from lib.parallel import flight_recorder
from lib.parallel.layout import ParallelLayout
from lib.planning import capacity
from lib.train.config import Config
from lib.train.estimates import ModelCost

PHASES = ("data", "forward", "backward", "update", "optimizer")  # `optimizer` is in `update`
_COLLECT_EVERY = 100  # steps between two garbage collections
_MOST_ALLOCATIONS = 1_000_000  # allocations that the allocator's history keeps
_TABLE_ROWS = 40


class Pace:
    """Times the steps of a launch, including the evaluations and saves between them.

    The first step is left out, because it compiles, allocates and warms up.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._began = 0.0

    def count_step(self) -> None:
        """Count a step that has ended."""
        self.steps += 1
        if self.steps == 1:
            self._began = time.perf_counter()

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean seconds per step so far; None before the second step has ended."""
        return (time.perf_counter() - self._began) / (self.steps - 1) if self.steps > 1 else None


class TimedSteps(NamedTuple):
    """Contains start and end of each phase of some steps, which the GPU may not have reached yet.

    spans: name, start and end of each phase. A time is an event of the stream on CUDA, and the
    seconds of `time.perf_counter` on a CPU. steps: number of steps.
    """

    spans: list[tuple[str, Any, Any]]
    began: Any
    ended: Any
    steps: int

    def read(self) -> dict[str, float]:
        """Return `time/<phase>` and `time/total` in ms per step.

        The device must have completed the steps.
        """
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, began, ended in self.spans:
            sums[phase] += _measure_milliseconds(began, ended)
        sums["total"] = _measure_milliseconds(self.began, self.ended)
        return {f"time/{phase}": ms / self.steps for phase, ms in sums.items()}


def _measure_milliseconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return (ended - began) * 1000
    return began.elapsed_time(ended)


class Timers:
    """Times the phases of the steps since the last `capture`: `with timers("forward"): ...`.

    On CUDA this records events on the stream, so neither timing nor capturing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = self._now()
        yield
        self._spans.append((phase, began, self._now()))

    def count_step(self) -> None:
        """Count a step that has ended."""
        self._steps += 1

    def capture(self) -> TimedSteps:
        """Return the times since the last call, to be read later, and start a new window."""
        timed = TimedSteps(self._spans, self._began, self._now(), max(self._steps, 1))
        self._start_window(timed.ended)
        return timed

    def restart(self) -> None:
        """Start a new window now, so that the time since the last step (a save) is not counted."""
        self._start_window(self._now())

    def _start_window(self, now: Any) -> None:
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps = 0
        self._began = now

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepProfiler(Protocol):
    """Profiles some steps of a run. step: from 1."""

    def begin_step(self, step: int) -> None: ...

    def end_step(self, step: int) -> None: ...


class Profiler:
    """Profiles the time and memory of every operation from one step to another.

    span: first and last step, None for no profile. Each rank writes
    rank_00000.steps_10-12.json.gz (open it in Perfetto or chrome://tracing), a .txt with a table of
    the most expensive operations and, on CUDA, a snapshot of the allocator for
    https://pytorch.org/memory_viz. Under Nsight Systems the steps become the capture range of
    `nsys profile --capture-range=cudaProfilerApi` instead, since CUDA allows only one profiler.
    """

    def __init__(
        self, span: tuple[int, int] | None, directory: Path, rank: int, device: torch.device
    ) -> None:
        self._first, self._last = span or (0, 0)
        self._stem = directory / f"rank_{rank:05d}.steps_{self._first}-{self._last}"
        self._on_gpu = device.type == "cuda"
        self._by_nsight = self._on_gpu and any(name.startswith("NSYS_") for name in os.environ)
        self._recording: profile | None = None
        self._may_fail = log.WarnOnce(str(directory), OSError, RuntimeError)

    def has_passed(self, step: int) -> bool:
        """Return whether a run resumed after `step` is too late for a profile that is missing."""
        return 0 < self._first <= step and not Path(f"{self._stem}.txt").exists()

    def begin_step(self, step: int) -> None:
        """Start the profile if `step` (from 1) is the first of the span."""
        if step != self._first:
            return
        if self._by_nsight:
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else [])
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._recording = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._recording.start()

    def end_step(self, step: int) -> None:
        """Write the profile if `step` is the last of the span. A failure is only logged."""
        if self._by_nsight and step == self._last:
            torch.cuda.synchronize()  # the range includes the work that is still queued
            torch.cuda.profiler.stop()
        if self._recording is None or step < self._last:
            return
        recording = self._recording
        self._recording = None
        recording.stop()
        with self._may_fail:
            self._write(recording)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, recording: profile) -> None:
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(f"{self._stem}.json.gz")
        order = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        Path(f"{self._stem}.txt").write_text(
            recording.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS), encoding="utf-8"
        )
        if self._on_gpu:
            write_snapshot(Path(f"{self._stem}.memory.pickle"))
        log.info(f"profile: {self._stem}.json.gz and .txt")


def write_snapshot(path: Path) -> None:
    """Write the blocks of the CUDA allocator and where in the code each was requested."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


class Meters:
    """Measures the steps of a rank with its timers, profiler, memory figures and watchdog.

    As a context manager, it makes Python collect garbage every 100 steps, on all ranks in the same
    steps.

    cost: contains the floating-point operations per token. peak: FLOP/s of a GPU, None on a CPU.
    memory_before: GiB in use before the model was allocated. memory_peak: GiB, the maximum since
    then.
    """

    def __init__(
        self,
        config: Config,
        experiment: Experiment,
        layout: ParallelLayout,
        cost: ModelCost,
        peak: float | None,
        memory_before: float,
        step: int,
    ) -> None:
        """Start to measure a run. step: the step after which the run continues."""
        self._layout = layout
        self.cost = cost
        self.peak = peak
        self.memory_before = memory_before
        self.memory_peak = 0.0
        self.timers = Timers(layout.device)
        profiler = Profiler(config.profile, experiment.profile, layout.rank, layout.device)
        self.profiler: StepProfiler = profiler
        if config.profile and profiler.has_passed(step) and layout.rank == 0:
            first, last = config.profile
            log.warn(
                f"--profile {first}:{last} records nothing: the run continues after step {step:,}"
            )
        rank_log = experiment.rank_log(layout.rank)
        self.watchdog = Watchdog(
            config.watchdog_minutes,
            rank_log.with_suffix(".stacks.txt"),
            lambda: flight_recorder.dump_collectives(rank_log.with_suffix(".collectives.json")),
        )

    def __enter__(self) -> Meters:
        # If ranks collected garbage at different times, each would make the others wait.
        # Objects that exist now stay for the whole run and are never examined again.
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        self.show_end()

    def show_end(self) -> None:
        """Show the watchdog that this process works at the end of the run."""
        self.watchdog.enter("end")

    def begin_step(self, step: int) -> None:
        """Start measuring a step. step: from 1."""
        self.profiler.begin_step(step)

    def end_step(self, step: int) -> None:
        """End measuring a step. step: from 1."""
        self.timers.count_step()
        self.profiler.end_step(step)
        self.watchdog.enter("step")
        if step % _COLLECT_EVERY == 0:
            gc.collect()

    @contextmanager
    def pause(self, section: str) -> Iterator[None]:
        """Leave the time of a block out of the step times. section: its name for the watchdog."""
        self.watchdog.enter(section)
        yield
        self.timers.restart()
        self.watchdog.enter("step")

    def memory(self) -> dict[str, float]:
        """Return the memory figures of this rank, `memory/…`, in GiB.

        `memory/peak_gib` covers the launch, `memory/window_peak_gib` the time since the last call.
        """
        in_use = capacity.memory_usage(self._layout.device)
        window_peak = in_use["memory/peak_gib"]
        self.memory_peak = max(self.memory_peak, window_peak)
        peaks = {"memory/peak_gib": self.memory_peak, "memory/window_peak_gib": window_peak}
        return in_use | peaks
