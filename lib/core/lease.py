"""One process at a time may write a directory: a lock that also works where file locks do not.

A lock of the kernel (flock) is exact on one machine, and on network file systems that pass it on;
some are mounted without that. So the holder also writes `lock.json` (host, pid, boot id) and keeps
changing it. Whoever finds such a record asks the kernel about the process, when it would be one of
this machine, and otherwise waits to see whether the record still changes: clocks are not compared.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.core import log, manifest, publish
from lib.core.errors import UsageError

BEAT_S = 10.0
PATIENCE_S = 35.0  # without a beat before a record of another machine counts as left behind


class Lease:
    """The right to write a directory, held until `release` or the end of the process.

    lost: called in the thread when another process has taken the directory over, as it may when
    this one was stopped for longer than PATIENCE_S.
    """

    def __init__(self, path: Path, lost: Callable[[str], None]) -> None:
        """Take the directory that `path`, the record, lies in.

        Raises UsageError when another process has it.
        """
        self._path, self._lost = path, lost
        self._lock = publish.lock(path.parent)
        if self._lock < 0:
            raise _taken(path.parent, _read(path))
        _require_left(path)
        self._record = {"host": platform.node(), "pid": os.getpid(), "born": _born(os.getpid()),
                        "machine": _machine(), "id": f"{time.time_ns():x}"}
        self._ended = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others take the directory."""
        self._ended.set()
        self._thread.join()
        if _read(self._path).get("id") == self._record["id"]:
            self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(BEAT_S):
            found = _read(self._path)
            if found.get("id", self._record["id"]) != self._record["id"]:
                self._lost(f"{self._path.parent} was taken over by {_holder(found)}")
                return
            beats += 1
            try:
                self._write(beats)
            except OSError as error:  # a full disk; the lock of the kernel is still held
                log.warn(f"{self._path} could not be renewed: {error}")

    def _write(self, beats: int) -> None:
        manifest.write_json(self._path, self._record | {"beats": beats})


def is_alive(record: dict[str, Any]) -> bool | None:
    """Tell whether the process that wrote a record is there; None when it is of another machine."""
    if record.get("machine") != _machine() or not _machine():
        return None
    return _born(record.get("pid", 0)) == record.get("born")


def _require_left(path: Path) -> None:
    """Return once a record is known to be left behind; UsageError when its holder is alive."""
    found = _read(path)
    if not found:
        return
    if (alive := is_alive(found)) is not None:
        if alive:
            raise _taken(path.parent, found)
        return
    log.info(f"{path} is of {_holder(found)}: waiting {PATIENCE_S:.0f} s to see whether it lives")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = _read(path)
        if not now:  # released
            return
        if now != found:
            raise _taken(path.parent, now)
    log.info(f"{_holder(found)} is gone: its lock is taken over")


def _taken(directory: Path, found: dict[str, Any]) -> UsageError:
    return UsageError(f"another launch is training {directory} now",
                      found=_holder(found) if found else "",
                      hint="wait for it, stop it, or use another --experiment-name")


def _holder(found: dict[str, Any]) -> str:
    return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _machine() -> str:
    """Return what processes share for which a pid means the same: boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def _born(pid: int) -> str | None:
    """Return when a process began, in ticks since the boot; None when there is none.

    Tells a process from a later one with the same number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
