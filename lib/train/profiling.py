"""`--profile START:END`: what every operation of some steps costs, and where the memory is.

Each rank writes outputs/<exp>/profile/rank_00000.steps_10-12.json.gz (open it in Perfetto or
chrome://tracing), a table of the dearest operations beside it and, on CUDA, a snapshot of the
allocator for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lib.core import log

_EVENTS = 1_000_000  # of the allocator's history to keep
_ROWS = 40


class Profiler:
    """Records the steps [first, last] of this rank; span: START:END, None for nothing."""

    def __init__(self, span: tuple[int, int] | None, directory: Path, rank: int,
                 device: torch.device) -> None:
        self._first, self._last = span or (0, 0)
        self._stem = directory / f"rank_{rank:05d}.steps_{self._first}-{self._last}"
        self._on_gpu = device.type == "cuda"
        self._recording: profile | None = None
        self._may_fail = log.Tolerated(str(directory), OSError, RuntimeError)

    def has_passed(self, step: int) -> bool:
        """Tell whether a run that goes on after `step` begins too late, and recorded nothing yet.
        """
        return 0 < self._first <= step and not Path(f"{self._stem}.txt").exists()

    def before(self, step: int) -> None:
        """Begin to record when `step` (from 1) is the first of the span."""
        if step != self._first:
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
        self._recording = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._recording.start()

    def after(self, step: int) -> None:
        """Write what was recorded when `step` was the last of the span; that may fail."""
        if self._recording is None or step < self._last:
            return
        recording, self._recording = self._recording, None
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
            recording.key_averages().table(sort_by=order, row_limit=_ROWS), encoding="utf-8")
        if self._on_gpu:
            snapshot(Path(f"{self._stem}.memory.pickle"))
        log.info(f"profile: {self._stem}.json.gz and .txt")


def snapshot(path: Path) -> None:
    """Write what the CUDA allocator holds and where it was asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))

