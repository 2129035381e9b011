"""What the steps of a run cost: their loss, time and memory, and each operation of some of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from lib.core import log
from lib.core.paths import Experiment
from lib.core.watchdog import Watchdog
from lib.parallel import flight_recorder
from lib.parallel.layout import ParallelLayout
from lib.planning import capacity
from lib.train.config import Config

PHASES = ("data", "forward", "backward", "update", "optimizer")  # the last is part of `update`
_COLLECT_EVERY = 100  # steps
_EVENTS = 1_000_000  # of the allocator's history to keep
_ROWS = 40


class Pace:
    """Wall time of a launch's steps with evaluation and saves between them, without the first step.

    That one compiles, allocates and warms up, and no other step takes as long.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._began = 0.0

    def step_done(self) -> None:
        """Note the end of a step."""
        self.steps += 1
        if self.steps == 1:
            self._began = time.perf_counter()

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean until now, None while there is only the first step."""
        return (time.perf_counter() - self._began) / (self.steps - 1) if self.steps > 1 else None


class TimedSteps(NamedTuple):
    """Holds when the phases of some steps began and ended; on CUDA the device may still be behind.

    A mark is an event on the stream on CUDA, and seconds by `time.perf_counter` on a CPU.
    """

    spans: list[tuple[str, Any, Any]]
    began: Any
    ended: Any
    steps: int

    def read(self) -> dict[str, float]:
        """Return `time/<phase>` and `time/total`, ms per step; the device must have done them."""
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, began, ended in self.spans:
            sums[phase] += _milliseconds(began, ended)
        sums["total"] = _milliseconds(self.began, self.ended)
        return {f"time/{phase}": ms / self.steps for phase, ms in sums.items()}


def _milliseconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return (ended - began) * 1000
    return began.elapsed_time(ended)


class Timers:
    """Time the phases of steps, as means over the steps since the last `capture`.

    On CUDA they are events on the stream, so neither timing nor capturing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = self._mark()
        yield
        self._spans.append((phase, began, self._mark()))

    def step_done(self) -> None:
        """Note the end of a step."""
        self._steps += 1

    def capture(self) -> TimedSteps:
        """Return the steps since the last call, to be read later, and start anew."""
        timed = TimedSteps(self._spans, self._began, self._mark(), max(self._steps, 1))
        self._begin(timed.ended)
        return timed

    def restart(self) -> None:
        """Begin a window now: what came since the last step (a save, say) is no one's time."""
        self._begin(self._mark())

    def _begin(self, mark: Any) -> None:
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps = 0
        self._began = mark

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Profiler:
    """Records what every operation of the steps [first, last] costs, and where the memory is.

    span: START:END, None for nothing. Each rank writes rank_00000.steps_10-12.json.gz (open it in
    Perfetto or chrome://tracing), a table of the dearest operations beside it and, on CUDA, a
    snapshot of the allocator for https://pytorch.org/memory_viz. Under Nsight Systems the steps are
    the range of `nsys profile --capture-range=cudaProfilerApi` instead: CUDA lets one tool listen.
    """

    def __init__(
        self, span: tuple[int, int] | None, directory: Path, rank: int, device: torch.device
    ) -> None:
        self._first, self._last = span or (0, 0)
        self._stem = directory / f"rank_{rank:05d}.steps_{self._first}-{self._last}"
        self._on_gpu = device.type == "cuda"
        self._by_nsight = self._on_gpu and any(name.startswith("NSYS_") for name in os.environ)
        self._recording: profile | None = None
        self._may_fail = log.Tolerated(str(directory), OSError, RuntimeError)

    def has_passed(self, step: int) -> bool:
        """Return whether a run resumed after `step` starts too late with nothing recorded yet."""
        return 0 < self._first <= step and not Path(f"{self._stem}.txt").exists()

    def before(self, step: int) -> None:
        """Begin to record when `step` (from 1) is the first of the span."""
        if step != self._first:
            return
        if self._by_nsight:
            torch.cuda.profiler.start()
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else [])
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
        self._recording = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._recording.start()

    def after(self, step: int) -> None:
        """Write what was recorded when `step` was the last of the span; that may fail."""
        if self._by_nsight and step == self._last:
            torch.cuda.synchronize()  # what was launched belongs to the range
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
            recording.key_averages().table(sort_by=order, row_limit=_ROWS), encoding="utf-8"
        )
        if self._on_gpu:
            snapshot(Path(f"{self._stem}.memory.pickle"))
        log.info(f"profile: {self._stem}.json.gz and .txt")


def snapshot(path: Path) -> None:
    """Write what the CUDA allocator holds and where it was asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


class Meters:
    """All that follows the steps of a run, on each rank.

    flops: per token, forward and backward. peak: FLOP/s of a rank. memory_before: GiB in use before
    the model had memory. memory_peak: the most since then.
    """

    def __init__(
        self,
        config: Config,
        experiment: Experiment,
        layout: ParallelLayout,
        flops: float,
        peak: float,
        memory_before: float,
        step: int,
    ) -> None:
        """step: where the run goes on."""
        self._layout = layout
        self.flops = flops
        self.peak = peak
        self.memory_before = memory_before
        self.memory_peak = 0.0
        self.timers = Timers(layout.device)
        self.profiler = Profiler(config.profile, experiment.profile, layout.rank, layout.device)
        if config.profile and self.profiler.has_passed(step) and layout.rank == 0:
            first, last = config.profile
            log.warn(
                f"--profile {first}:{last} records nothing: the run goes on after step {step:,}"
            )
        rank_log = experiment.rank_log(layout.rank)
        self.watchdog = Watchdog(
            config.watchdog_minutes,
            rank_log.with_suffix(".stacks.txt"),
            lambda: flight_recorder.dump(rank_log.with_suffix(".collectives.json")),
        )

    def __enter__(self) -> Meters:
        # From now on all ranks collect garbage in the same steps: left alone, each would stop the
        # others in turn. What there is now is never looked at again.
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.enter("end")

    def begin(self, step: int) -> None:
        """Note that a step (from 1) begins."""
        self.profiler.before(step)

    def end(self, step: int) -> None:
        """Note that a step has ended."""
        self.timers.step_done()
        self.profiler.after(step)
        self.watchdog.enter("step")
        if step % _COLLECT_EVERY == 0:
            gc.collect()

    @contextmanager
    def aside(self, section: str) -> Iterator[None]:
        """Do something other than steps, whose time does not count as theirs.

        section: see Watchdog.
        """
        self.watchdog.enter(section)
        yield
        self.timers.restart()
        self.watchdog.enter("step")

    def memory(self) -> dict[str, float]:
        """Return the memory in use, `memory/…_gib`.

        `peak` covers the launch, `window_peak` the time since the last call.
        """
        in_use = capacity.memory_usage(self._layout.device)
        window_peak = in_use["memory/peak_gib"]
        self.memory_peak = max(self.memory_peak, window_peak)
        peaks = {"memory/peak_gib": self.memory_peak, "memory/window_peak_gib": window_peak}
        return in_use | peaks
