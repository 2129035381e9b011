"""Run torchrun once on this node: start, watch and stop it, and leave no process behind.

torchrun starts each rank in its own session, and its ranks survive if it is killed. So this process
adopts orphaned descendants (as a subreaper) and finds them in /proc.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.supervision import outcome
from launch.supervision.outcome import NodeOutcome
from lib.core import liveness
from lib.core.retry import poll

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_END_GRACE_S = 20.0  # after a rank, or torchrun on another node, has ended
_LEFTOVER_GRACE_S = 5.0  # for processes that outlive torchrun
_AFTER_SAVE_S = 30.0
_KILL_TIMEOUT_S = 30.0  # after that, a process hangs in the kernel, on a device or a mount
_MEMORY_WINDOW_S = 60.0


@dataclass(frozen=True)
class NodeCommand:
    """The command to run on this node.

    environment: variables to set in addition to the current ones. save_seconds: how long a save
    may take.
    """

    words: list[str]
    environment: dict[str, str]
    save_seconds: float


class Attempt:
    """Runs a command with its descendants: call `tick` until it returns True, then `outcome`.

    If this process is killed, the command receives SIGTERM.
    """

    def __init__(self, command: NodeCommand, node: int) -> None:
        self._save_seconds = command.save_seconds
        self._node = node
        self._logs = tempfile.TemporaryDirectory(prefix="launch-")
        self._kills = _count_oom_kills()
        self._killed_at = float("-inf")
        self._deadline = float("inf")
        self._stopping = False
        self._ended_at = 0.0
        # Each rank writes an error file below PET_LOG_DIR; torchrun's own is named here.
        torchrun = {
            "PET_LOG_DIR": self._logs.name,
            "TORCHELASTIC_ERROR_FILE": str(Path(self._logs.name) / outcome.ERROR_FILE),
        }
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(
            command.words,
            env={**os.environ, **command.environment, **torchrun},
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

    def tick(self) -> bool:
        """Kill the processes after their deadline, and return whether all have ended."""
        if (kills := _count_oom_kills()) > self._kills:
            self._kills = kills
            self._killed_at = time.monotonic()
        if any(Path(self._logs.name).rglob(outcome.ERROR_FILE)):
            self.abandon()  # the other ranks may wait in a collective for the one that failed
        deadline = self._deadline
        if self._process.poll() is not None:
            if not self._running():
                return True
            self._ended_at = self._ended_at or time.monotonic()
            if not self._stopping:  # ranks that are saving may outlive torchrun
                deadline = min(deadline, self._ended_at + _LEFTOVER_GRACE_S)
        if time.monotonic() < deadline:
            return False
        if survivors := self._kill_all():
            print(f"launcher: these processes cannot be killed: {survivors}", flush=True)
        return True

    def stop(self, signal_name: str) -> None:
        """Ask all ranks to save and end, and give them time for it; later calls change nothing."""
        if self._stopping:
            return
        self._stopping = True
        if self._process.poll() is None:  # torchrun passes the signal on to its ranks
            self._process.send_signal(signal.Signals[signal_name])
        self.abandon(self._save_seconds + _AFTER_SAVE_S)

    def abandon(self, seconds: float = _END_GRACE_S) -> None:
        """Kill the command after some seconds, since another rank or node has ended or is lost."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def outcome(self) -> NodeOutcome:
        """Return how the command ended; call this once."""
        failures = outcome.read_failures(Path(self._logs.name), self._node)
        self._logs.cleanup()
        return NodeOutcome(
            self._node,
            self._process.poll(),
            failures,
            time.monotonic() - self._killed_at < _MEMORY_WINDOW_S,
        )

    def _kill_all(self) -> list[int]:
        """Kill all descendants; return the processes that survive."""
        survivors: list[int] = []

        def have_ended() -> bool:
            nonlocal survivors
            survivors = self._running()
            for pid in survivors:  # each time, since one of them may just have started another
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not survivors

        poll(have_ended, every=0.05, patience=_KILL_TIMEOUT_S)
        return survivors

    def _running(self) -> list[int]:
        """Return the descendants that are running, and reap orphans that have ended."""
        self._process.poll()
        descendants = liveness.list_descendants(os.getpid())
        for process in descendants:
            is_orphan = process.parent == os.getpid() and process.pid != self._process.pid
            if process.has_ended and is_orphan:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        return [process.pid for process in descendants if not process.has_ended]


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out.

    Covers this container or job if its control group keeps a count, otherwise the whole machine.
    """
    counters = [Path("/proc/vmstat")]
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root, name = (
                    ("", "memory.events") if not controllers else ("memory", "memory.oom_control")
                )
                counters = [
                    Path("/sys/fs/cgroup") / root / path.strip("/") / name,
                    Path("/sys/fs/cgroup") / root / name,
                    *counters,
                ]
    for counter in counters:
        with suppress(OSError, ValueError):
            rows = dict(line.split(None, 1) for line in counter.read_text().splitlines())
            if "oom_kill" in rows:
                return int(rows["oom_kill"])
    return 0
