"""End a process that hangs, with the stacks of all its threads, so that a launcher can restart it.

If one rank stops, or the network loses a message, all others wait in a collective forever (gloo) or
until the timeout of the process group (NCCL). A disk that hangs may stop a rank at any point. So
nothing in this module waits long for a disk or a pipe. If the interpreter itself hangs (a read of a
memory-mapped file blocks while it holds the interpreter lock), a thread of faulthandler, which
needs no lock, ends the process.
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

_CHECK_EVERY_S = 1.0
_FROZEN_S = 15.0  # after the limit, until faulthandler ends the process
# Multiples of the limit of a step. A save, an evaluation or samples take as long as many steps, and
# the first step may compile.
_FACTORS = {
    "step": 1.0,
    "first step": 3.0,
    "evaluation": 6.0,
    "samples": 6.0,
    "save": 6.0,
    "end": 6.0,
}


_is_stopped = threading.Event()


def stop_watchdog() -> None:
    """Stop the watchdog of this process, for a wait at its end that is limited otherwise."""
    _is_stopped.set()


class Watchdog:
    """Ends the process if a section of the training takes too long.

    minutes: limit of a step, 0 for no watchdog; other sections may take a multiple of it. stacks:
    file for the stacks of all threads. before_end: called before the process ends.
    """

    def __init__(
        self, minutes: float, stacks: Path, before_end: Callable[[], None] = lambda: None
    ) -> None:
        self._seconds = minutes * 60
        self._stacks = stacks
        self._before_end = before_end
        self.enter("first step")
        if minutes:
            self._output = _open_output()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: str) -> None:
        """Start a section, which ends the previous one. section: a key of _FACTORS."""
        self._section = section
        self._since = time.monotonic()

    def _watch(self) -> None:
        while not _is_stopped.is_set():
            section = self._section
            since = self._since
            limit = self._seconds * _FACTORS[section]
            remaining = since + limit - time.monotonic()
            if remaining < 0:
                self._end(section, limit)
            faulthandler.dump_traceback_later(remaining + _FROZEN_S, exit=True, file=self._output)
            _is_stopped.wait(_CHECK_EVERY_S)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, section: str, limit: float) -> None:
        text = (
            f"watchdog: the {section} has not ended for {limit / 60:g} minutes; the stacks of "
            f"all threads are in {self._stacks}; run the same command to resume"
        )
        launcher.end_at_once(
            EXIT_BUG,
            lambda: launcher.record_failure("Watchdog", EXIT_BUG, text),
            lambda: os.write(2, f"[rank={log.rank()}] error: {text}\n".encode()),
            self._write_stacks,
            self._before_end,
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
    """Return the largest limit of a section in seconds. minutes: limit of a step."""
    return minutes * 60 * max(_FACTORS.values())


def _open_output() -> int:
    """Return a descriptor that never blocks: standard error if it is a pipe or a terminal.

    A full pipe loses the rest of the output. If standard error is a file, whose disk may hang, all
    output to this descriptor is lost.
    """
    with suppress(OSError):
        mode = os.fstat(2).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.open(os.devnull, os.O_WRONLY)
