"""Stopping in good order: a signal is noted, all ranks agree on it, the step is finished."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from lib.train.distributed import World

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Turns SIGTERM, SIGINT and SIGUSR1 on any rank into one decision of all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.signal = 0
        self._agreed = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def ask(self) -> None:
        """Start the agreement, at the start of a step, so that it costs no waiting at its end."""
        self._agreed = torch.tensor([self.signal], dtype=torch.int32)
        self._pending = dist.all_reduce(self._agreed, dist.ReduceOp.MAX, self._world.control,
                                        async_op=True)

    def agreed(self) -> str:
        """Return the name of the signal on which all ranks agreed, or an empty string."""
        self._pending.wait()
        number = int(self._agreed)
        return signal.Signals(number).name if number else ""
