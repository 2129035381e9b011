"""How long to wait before a request is made again."""

from __future__ import annotations

import random
import threading
import time

from lib.core import log, units

_LONGEST_S, _LONGEST_ASKED_S = 30.0, 600.0


class Pause:
    """The wait before requests, shared by all threads: the Hub limits users, not connections."""

    def __init__(self, stopped: threading.Event) -> None:
        self._until, self._lock, self._stopped = 0.0, threading.Lock(), stopped

    def wait(self) -> None:
        """Sleep until requests may be made again."""
        while (left := self._until - time.monotonic()) > 0 and not self._stopped.wait(left):
            pass

    def after(self, asked: float, failures: int) -> None:
        """Note a failure: wait as long as was asked for (seconds), or longer each time."""
        wanted = min(asked, _LONGEST_ASKED_S)
        with self._lock:
            if wanted > _LONGEST_S:
                log.info(f"the Hub asks to wait {units.duration(wanted)}")
            if wanted:  # holds for everyone
                self._until = max(self._until, time.monotonic() + wanted)
        if not wanted:  # with chance, so that not all who were refused come back at once
            self._stopped.wait(min(_LONGEST_S, 2.0 ** max(0, failures - 1))
                               * random.uniform(0.75, 1.25))
