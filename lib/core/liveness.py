"""Find out which processes are alive: the kernel knows local ones, others send heartbeats.

A process whose end other machines must notice keeps changing a value that they can read: a file or
a key of a store. Clocks of machines are not compared.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

_ENDED = "ZX"  # states of a process that has ended: zombie, dead


class Process(NamedTuple):
    """A process of this machine, as the kernel shows it.

    state: one letter. started: ticks since the boot, which distinguish it from a later process with
    the same pid.
    """

    pid: int
    state: str
    parent: int
    started: str

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended and only its exit code is left."""
        return self.state in _ENDED


def read_process(pid: object) -> Process | None:
    """Return the process with a pid; None if there is none, or for a pid that is not valid."""
    try:
        number = int(pid)  # type: ignore[call-overload]
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, TypeError):
        return None
    # The name of the program, in brackets, may contain spaces and brackets itself.
    fields = text.rpartition(")")[2].split()
    return Process(number, fields[0], int(fields[1]), fields[19]) if len(fields) > 19 else None


def list_processes() -> list[Process]:
    """Return all processes of this machine that this one can see."""
    processes = (read_process(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [process for process in processes if process]


def list_descendants(pid: int) -> list[Process]:
    """Return the child processes of a process, their child processes, and so on."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for process in list_processes():
        children[process.parent].append(process)
    descendants: list[Process] = []
    parents = [pid]
    while parents:
        below = children[parents.pop()]
        descendants += below
        parents += [process.pid for process in below]
    return descendants


def start_time(pid: object) -> str | None:
    """Return when a process started, in ticks since the boot; None if it has ended."""
    process = read_process(pid)
    return None if process is None or process.has_ended else process.started


def machine_identity() -> str:
    """Return a text shared by processes for which a pid means the same: boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def process_identity(pid: int) -> str:
    """Return a text that no other process has, on any machine, now or later."""
    return f"{machine_identity()} {pid} {start_time(pid)}"


def process_record(pid: int) -> dict[str, Any]:
    """Return the values, for JSON, by which `is_alive` recognises a process."""
    return {"pid": pid, "born": start_time(pid), "machine": machine_identity()}


def is_alive(record: dict[str, Any]) -> bool | None:
    """Return whether the process of a record is alive; None if it is on another machine."""
    if record.get("machine") != machine_identity() or not machine_identity():
        return None
    return start_time(record.get("pid", 0)) == record.get("born")


class SilenceClock:
    """Measures how long values that other processes keep changing have stayed the same.

    longest_gap: the most seconds that count between two calls of `look`. Without this limit, a
    process that was itself suspended would consider all others dead.
    """

    def __init__(self, longest_gap: float = math.inf) -> None:
        self._longest_gap = longest_gap
        self._looked = time.monotonic()
        self._gap = 0.0
        self._seen: dict[Hashable, tuple[object, float, bool]] = {}

    def look(self) -> None:
        """Begin a new round; `note` the current value of each key after it."""
        now = time.monotonic()
        self._gap = min(now - self._looked, self._longest_gap)
        self._looked = now

    def note(self, key: Hashable, value: object) -> None:
        """Note the current value of a key, None if there is none."""
        before, seconds, has_changed = self._seen.get(key, (value, -self._gap, False))
        if value == before:
            self._seen[key] = value, seconds + self._gap, has_changed
        else:
            self._seen[key] = value, 0.0, value is not None

    def silence(self, key: Hashable) -> float:
        """Return for how many seconds a value has not changed; 0 if it was never noted."""
        return self._seen[key][1] if key in self._seen else 0.0

    def has_changed(self, key: Hashable) -> bool:
        """Return whether a value was seen to change, so that a process writes or wrote it."""
        return key in self._seen and self._seen[key][2]
