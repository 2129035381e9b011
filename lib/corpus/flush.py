"""Makes files durable behind the back of whoever writes them, so that disk and parsers overlap."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

_MAX_WAITING = 4  # beyond it the writer waits for the disk


class Flusher:
    """One thread that syncs files and does other work, in the order in which it was asked to.

    What fails there (no room, say) is raised by the next call.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def sync(self, file: BinaryIO) -> None:
        """Make durable what a file holds now; it may be closed meanwhile."""
        descriptor = os.dup(file.fileno())

        def work() -> None:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        self.then(work)

    def then(self, work: Callable[[], None]) -> None:
        """Do some work after all that was asked for before."""
        self._waiting.append(self._thread.submit(work))
        while len(self._waiting) > _MAX_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Return when everything is done."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread after what it was asked to do; its errors no longer matter."""
        self._thread.shutdown(wait=True)
