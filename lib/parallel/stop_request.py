"""Stop a run after a complete step: any rank notes a reason, and all ranks agree on it."""

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


class StopRequest:
    """Turns a reason to stop on any rank into one decision of all ranks.

    Reasons are SIGTERM, SIGINT and SIGUSR1, the end of `minutes` since the start (None: no limit),
    the stop file, which is deleted once all ranks stop, and the end of the torchrun that started a
    rank, because nothing else would end that rank. Creating an instance installs the signal
    handlers.
    """

    def __init__(self, layout: ParallelLayout, stop_file: Path, minutes: float | None) -> None:
        self._layout = layout
        self._file = stop_file
        self._deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
        self._checked_at = 0.0
        self.reason = 0
        self._agreed = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = number

    def ask(self) -> None:
        """Start the agreement at the start of a step, so that no rank waits for it at the end."""
        now = time.monotonic()
        if now > self._deadline:
            self.reason = self.reason or _OUT_OF_TIME
        elif launcher.is_gone():
            self.reason = self.reason or _NO_LAUNCHER
        elif self._layout.rank == 0 and now - self._checked_at > _CHECK_EVERY_S:
            self._checked_at = now
            if self._file.exists():
                self.reason = self.reason or _STOP_FILE
        self._agreed = torch.tensor([self.reason], dtype=torch.int32)
        self._pending = dist.all_reduce(
            self._agreed, dist.ReduceOp.MAX, self._layout.control, async_op=True
        )

    def agreed(self) -> str:
        """Return the reason on which all ranks agreed, empty to continue. `ask` comes first."""
        assert self._pending is not None, "`ask` was not called"
        self._pending.wait()
        number = int(self._agreed)
        if number and self._layout.rank == 0:  # any stop also answers the file
            with suppress(OSError):
                self._file.unlink()
        return _REASONS[number] if number else ""
