"""Ends a process that hangs, with the stacks of all its threads, so that a launcher can restart it.

A rank that is stopped, or a network that swallows a message, leaves all others waiting in a
collective for good (gloo) or for the time-out of the process group (NCCL).
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path

from lib.core import failure, log
from lib.core.errors import EXIT_BUG

_LOOK_EVERY_S = 1.0
# A save or an evaluation does the work of many steps; the first step may compile.
_PATIENCE = {"step": 1.0, "first step": 3.0, "evaluation": 6.0, "save": 6.0}


class Watchdog:
    """Follows which section the training is in and since when.

    minutes: how long a step may take, other sections a multiple of it; 0 for no watchdog.
    stacks: the file that tells where every thread stood.
    """

    def __init__(self, minutes: float, stacks: Path) -> None:
        self._seconds, self._stacks = minutes * 60, stacks
        self._ended = threading.Event()
        self.enter("first step")
        if minutes:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: str) -> None:
        """Note that a section begins now; the one before has ended."""
        self._section, self._since = section, time.monotonic()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            section, since = self._section, self._since
            limit = self._seconds * _PATIENCE[section]
            if time.monotonic() - since > limit:
                self._end(section, limit)

    def _end(self, section: str, limit: float) -> None:
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        with self._stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        text = f"watchdog: the {section} has not ended for {limit / 60:g} minutes; the stacks of " \
               f"all threads are in {self._stacks}; the same command resumes"
        log.error(text)
        failure.record("Watchdog", EXIT_BUG, text)
        os.write(2, f"[rank={log.rank()}] error: {text}\n".encode())
        os._exit(EXIT_BUG)  # threads that hang in a collective would keep an ordinary exit waiting
