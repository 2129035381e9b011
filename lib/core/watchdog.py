"""Ends a process that hangs, with the stacks of all its threads, so that a launcher can restart it.

A rank that is stopped, or a network that swallows a message, leaves all others waiting in a
collective for good (gloo) or for the time-out of the process group (NCCL). A disk that hangs stops
a rank in the middle of anything. So nothing here waits for a disk or a pipe for long, and where
Python itself stands still (a page of a mapped file that never comes is waited for with Python's
lock held) faulthandler's own thread ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lib.core import launcher, log
from lib.core.errors import EXIT_BUG

_LOOK_EVERY_S = 1.0
_FROZEN_S = 15.0  # beyond the limit, until the process is ended from outside Python
# A save or an evaluation does the work of many steps; the first step may compile.
_PATIENCE = {"step": 1.0, "first step": 3.0, "evaluation": 6.0, "save": 6.0, "end": 6.0}


class Watchdog:
    """Follows which section the training is in and since when, until the process ends.

    minutes: how long a step may take, other sections a multiple of it; 0 for no watchdog.
    stacks: the file that tells where every thread stood. last_word: called before the end.
    """

    def __init__(
        self, minutes: float, stacks: Path, last_word: Callable[[], None] = lambda: None
    ) -> None:
        self._seconds = minutes * 60
        self._stacks = stacks
        self._last_word = last_word
        self.enter("first step")
        if minutes:
            self._outlet = _outlet()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: str) -> None:
        """Note that a section begins now; the one before has ended."""
        self._section = section
        self._since = time.monotonic()

    def _watch(self) -> None:
        while True:
            section = self._section
            since = self._since
            limit = self._seconds * _PATIENCE[section]
            left = since + limit - time.monotonic()
            if left < 0:
                self._end(section, limit)
            faulthandler.dump_traceback_later(left + _FROZEN_S, exit=True, file=self._outlet)
            time.sleep(_LOOK_EVERY_S)

    def _end(self, section: str, limit: float) -> None:
        text = (
            f"watchdog: the {section} has not ended for {limit / 60:g} minutes; the stacks of "
            f"all threads are in {self._stacks}; the same command resumes"
        )
        launcher.end_at_once(
            EXIT_BUG,
            lambda: launcher.record_failure("Watchdog", EXIT_BUG, text),
            lambda: os.write(2, f"[rank={log.rank()}] error: {text}\n".encode()),
            self._write_stacks,
            self._last_word,
            lambda: log.error(text),
        )

    def _write_stacks(self) -> None:
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            os.write(2, f"{self._stacks} cannot be written ({error.strerror}):\n".encode())
            faulthandler.dump_traceback(2, all_threads=True)


def longest_section(minutes: float) -> float:
    """Return the seconds that a section may take at most."""
    return minutes * 60 * max(_PATIENCE.values())


def _outlet() -> int:
    """Return a descriptor that never blocks: standard error if it is a pipe or a terminal.

    What is written to it beyond what a pipe takes is lost, and to a file, whose disk may hang, all.
    """
    with suppress(OSError):
        mode = os.fstat(2).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.open(os.devnull, os.O_WRONLY)
