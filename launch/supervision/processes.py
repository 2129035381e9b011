"""A command with all that descends from it: started, signalled as one, and none of it left behind.

torchrun gives each rank a session of its own, and dies without its ranks when it is killed. So this
process is made the one that orphans fall back to, and what descends from it is found in /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)
_KILLED_WITHIN_S = 30.0  # beyond it, a process is stuck in the kernel, on a device or a mount


class Command:
    """A running command and its descendants; this process becomes the parent of orphans among them.

    It is asked to stop (SIGTERM) when this process is killed.
    """

    def __init__(self, words: Sequence[str], more_environment: dict[str, str]) -> None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(words, env={**os.environ, **more_environment},
                                         start_new_session=True, preexec_fn=_stop_with_parent)

    def poll(self) -> int | None:
        """Return the command's own exit code, None while it runs; others may outlive it."""
        return self._process.poll()

    def ask_to_stop(self, signal_name: str) -> None:
        """Send a signal to the command alone, which passes it on."""
        if self.poll() is None:
            self._process.send_signal(signal.Signals[signal_name])

    def kill_all(self) -> list[int]:
        """Kill all of it; return what would not die."""
        deadline = time.monotonic() + _KILLED_WITHIN_S
        while (left := self.running()) and time.monotonic() < deadline:
            for pid in left:  # again and again: one of them may just have started another
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        return left

    def running(self) -> list[int]:
        """Return what descends from this process and has not ended, and reap orphans that have."""
        self.poll()
        me, children = os.getpid(), defaultdict(list)
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):  # it has just ended
                # The name of the program, in brackets, may hold spaces and brackets itself.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children[int(parent)].append((int(entry.name), state))
        running, parents = [], [me]
        while parents:
            parent = parents.pop()
            for pid, state in children[parent]:
                parents.append(pid)
                if state not in "ZX":
                    running.append(pid)
                elif parent == me and pid != self._process.pid:  # whose code is wanted
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
        return running


def _stop_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed here for want of memory.

    Of this container or job where control groups tell, else of the whole machine.
    """
    counters = [Path("/proc/vmstat")]
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root, name = ("", "memory.events") if not controllers else \
                    ("memory", "memory.oom_control")
                counters = [Path("/sys/fs/cgroup") / root / path.strip("/") / name,
                            Path("/sys/fs/cgroup") / root / name, *counters]
    for counter in counters:
        with suppress(OSError, ValueError):
            rows = dict(line.split(None, 1) for line in counter.read_text().splitlines())
            if "oom_kill" in rows:
                return int(rows["oom_kill"])
    return 0
