"""Stop a run after a complete step, for a reason that any rank has found and all agree on."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from lib.core import launcher
from lib.parallel.layout import ParallelLayout

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_OUT_OF_TIME = 1001
_STOP_FILE = 1002
_NO_LAUNCHER = 1003
_REASONS = {number.value: number.name for number in _SIGNALS} | {
    _OUT_OF_TIME: "--max-minutes",
    _STOP_FILE: "the stop file",
    _NO_LAUNCHER: "the end of its launcher",
}
_CHECK_EVERY_S = 2.0  # for the stop file, which may be on a slow file system


class StopRequested(Exception):
    """Raised on all ranks between two forward passes if the run must stop. reason: a text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """Lets all ranks stop together if one of them has a reason.

    Reasons are SIGTERM, SIGINT and SIGUSR1, a run of more than `minutes` (None: no limit), the stop
    file, and the death of torchrun, after which nothing else would stop the ranks. The stop file is
    deleted once all ranks stop. Creating an instance installs the signal handlers.
    """

    def __init__(self, layout: ParallelLayout, stop_file: Path, minutes: float | None) -> None:
        self._layout = layout
        self._file = stop_file
        self._deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
        self._checked_at = 0.0
        self.reason = 0
        self._largest_reason = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        for number in _SIGNALS:
            signal.signal(number, self._store_reason)

    def _store_reason(self, number: int, frame: FrameType | None) -> None:
        self.reason = number

    def begin_agreement(self) -> None:
        """Start to exchange reasons. Call this early in a step, so that no rank waits later."""
        now = time.monotonic()
        if now > self._deadline:
            self.reason = self.reason or _OUT_OF_TIME
        elif launcher.is_gone():
            self.reason = self.reason or _NO_LAUNCHER
        elif self._layout.rank == 0 and now - self._checked_at > _CHECK_EVERY_S:
            self._checked_at = now
            if self._file.exists():
                self.reason = self.reason or _STOP_FILE
        self._largest_reason = torch.tensor([self.reason], dtype=torch.int32)
        self._pending = dist.all_reduce(
            self._largest_reason, dist.ReduceOp.MAX, self._layout.control, async_op=True
        )

    def agree_on_reason(self) -> str:
        """Return the reason to stop, the same on all ranks, or "". Call `begin_agreement` first."""
        assert self._pending is not None, "`begin_agreement` was not called"
        self._pending.wait()
        number = int(self._largest_reason)
        if number and self._layout.rank == 0:  # also if the reason to stop is another one
            with suppress(OSError):
                self._file.unlink()
        return _REASONS[number] if number else ""

    def agree(self) -> str:
        """Return the reason to stop, the same on all ranks, or "". All ranks must call this."""
        self.begin_agreement()
        return self.agree_on_reason()

    def require_none(self) -> None:
        """Raise StopRequested on all ranks if one has a reason to stop. All ranks must call this.

        Call this between the forward passes of an evaluation, which may take longer than a launcher
        waits.
        """
        if reason := self.agree():
            raise StopRequested(reason)
