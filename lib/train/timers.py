"""The four timers of a step: data, forward, backward, update (and of that the optimizer alone),
and the pace of a launch.

On CUDA they are events on the stream, read at log points, so timing adds no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "forward", "backward", "update", "optimizer")


class Pace:
    """Wall time of a launch's steps with evaluation and saves between them, without the first step.

    That one compiles, allocates and warms up, and no other step takes as long.
    """

    def __init__(self) -> None:
        self.steps, self._began = 0, 0.0

    def step_done(self) -> None:
        """Note the end of a step."""
        self.steps += 1
        if self.steps == 1:
            self._began = time.perf_counter()

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean until now, None while there is only the first step."""
        return (time.perf_counter() - self._began) / (self.steps - 1) if self.steps > 1 else None


class Timers:
    """Milliseconds per phase, as means over the steps since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []
        self._steps = 0
        self._window_began = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = self._mark()
        yield
        self._spans.append((phase, began, self._mark()))

    def step_done(self) -> None:
        """Note the end of a step."""
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Return `time/<phase>` and `time/total` (wall time), ms per step, and start anew."""
        if self._cuda:
            torch.cuda.synchronize()
        sums = dict.fromkeys(PHASES, 0.0)
        for phase, began, ended in self._spans:
            sums[phase] += began.elapsed_time(ended) if self._cuda else (ended - began) * 1000
        now = time.perf_counter()
        sums["total"] = (now - self._window_began) * 1000
        steps = max(self._steps, 1)
        self.restart()
        return {f"time/{phase}": ms / steps for phase, ms in sums.items()}

    def restart(self) -> None:
        """Begin a window now: what came since the last step (a save, say) is no one's time."""
        self._spans, self._steps, self._window_began = [], 0, time.perf_counter()

    def _mark(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
