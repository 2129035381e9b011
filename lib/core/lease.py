"""One process at a time may write a directory: a lock that also works where file locks do not.

A lock of the kernel (flock) is exact on one machine, and on network file systems that pass it on;
some are mounted without that, and some keep it to one node. So the holder also has a record that
all machines see (host, pid, boot id). Only one process can make it, as a link to a name that is
taken fails everywhere, and its holder keeps changing it. Whoever finds such a record asks the
kernel about the process, when it would be one of this machine, and otherwise waits to see whether
the record still changes: clocks are not compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import log, records
from lib.core.errors import UsageError

BEAT_S = 10.0
PATIENCE_S = 35.0  # without a beat before a record of another machine counts as left behind
SETTLE_S = 1.0  # within which two that take the same record over have seen each other
_POLL_S = 1.0
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Held(UsageError):
    """Another process has the directory. holder: which one, in words, empty when nobody knows."""

    def __init__(self, problem: str, *, holder: str = "", hint: str = "") -> None:
        super().__init__(problem, found=holder, hint=hint)
        self.holder = holder


class ExperimentHeld(Held):
    """Another launch trains the experiment; a launcher knows this class by its name."""


class Lease:
    """Gives the right to write a directory, until `release` or the end of the process.

    lost: called in a thread when another process has taken the directory over, as it may when
    this one was stopped for longer than PATIENCE_S.
    """

    def __init__(self, path: Path, lost: Callable[[str], None]) -> None:
        """Take the directory that `path`, the record, lies in.

        It is this process's alone once this returns, so nothing has to be written first to settle
        that. Raises Held when another process has it, FileNotFoundError when it is gone.
        """
        self._path = path
        self._lost = lost
        self._beats = 0
        self._record = {
            "host": platform.node(),
            "pid": os.getpid(),
            "born": _born(os.getpid()),
            "machine": _machine(),
            "id": f"{time.time_ns():x}-{os.getpid()}",
        }
        self._lock = lock(path.parent)
        if self._lock < 0:
            raise self._held(records.read_mapping(path))
        try:
            self._file = self._take()
        except BaseException:
            os.close(self._lock)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Change the record no more, after a last look at whose it is; it stays until `release`."""
        self._ended.set()
        self._thread.join()
        self._is_own()

    def release(self, keep: bool = False) -> None:
        """Let others take the directory. keep: leave the record, which says who had it."""
        self.stop()
        if records.read_mapping(self._path).get("id") == self._record["id"]:
            if keep:
                self._record["released"] = True
                self._write()
            else:
                self._path.unlink(missing_ok=True)
        os.close(self._file)
        os.close(self._lock)

    def _held(self, record: dict[str, Any]) -> Held:
        return Held(f"another process has {self._path.parent} now", holder=holder(record))

    def _take(self) -> int:
        """Return the open record, made by this process; Held when another one's stays there."""
        is_shared = False
        file = None
        while file is None:
            if self._path.exists():
                found = records.read_mapping(self._path)
                is_shared = self._require_left(found)
                self._put_aside(found)
            file = self._make()
        if is_shared:  # whoever took over the same record at this very moment is seen by then
            time.sleep(SETTLE_S)
            if (now := records.read_mapping(self._path)).get("id") != self._record["id"]:
                os.close(file)
                raise self._held(now)
        return file

    def _make(self) -> int | None:
        """Return the open record if this process could make it, None where there is one."""
        own = self._path.with_name(f"{self._path.name}.{self._record['id']}")
        file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        made = False
        try:
            self._write(file)
            try:
                os.link(own, self._path)
                made = True
            except FileExistsError:  # which a file server may also say of a link that it has made
                with suppress(FileNotFoundError):
                    made = os.path.samestat(self._path.stat(), os.fstat(file))
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.close(file)
                file = -1
                with suppress(FileExistsError):
                    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                    self._write(file)
                    made = True
        finally:
            own.unlink(missing_ok=True)
            if not made and file >= 0:
                os.close(file)
        return file if made else None

    def _require_left(self, found: dict[str, Any]) -> bool:
        """Return once a record is known to be left behind; Held when its holder is alive.

        Returns whether another machine may be taking it over, too.
        """
        alive = is_alive(found)
        if found.get("released") or alive is not None:
            if alive and not found.get("released"):
                raise self._held(found)
            return alive is None
        # What cannot be read is being written this moment, or was cut by a power failure.
        patience = PATIENCE_S if found else SETTLE_S
        began = time.monotonic()
        is_logged = False
        while time.monotonic() - began < patience:
            time.sleep(min(_POLL_S, patience))
            if (now := records.read_mapping(self._path)) != found:
                if now:
                    raise self._held(now)
                return True  # released
            if not is_logged and time.monotonic() - began > BEAT_S:
                is_logged = True
                log.info(
                    f"{self._path} is of {holder(found)}, which has given no sign of life for "
                    f"{BEAT_S:.0f} s: waiting {PATIENCE_S:.0f} s in all"
                )
        if found:
            log.info(f"{holder(found)} is gone: {self._path.parent} is taken over")
        return True

    def _put_aside(self, found: dict[str, Any]) -> None:
        """Remove the record that was found, and no other that has come in its place."""
        aside = self._path.with_name(f"{self._path.name}.{self._record['id']}.old")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if (
            records.read_mapping(aside) != found
        ):  # another process was faster, and this is its record
            with suppress(OSError):
                os.link(aside, self._path)
        aside.unlink()

    def _beat(self) -> None:
        may_fail = log.Tolerated(str(self._path))  # the lock of the kernel is still held then
        while not self._ended.wait(BEAT_S):
            with may_fail:
                if not self._is_own():
                    return
                self._beats += 1
                if not self._path.exists():
                    self._restore()
                self._write()

    def _is_own(self) -> bool:
        """Tell whether no other process has made a record since; says so where one has."""
        found = records.read_mapping(self._path)
        if found.get("id", self._record["id"]) == self._record["id"]:
            return True
        self._lost(f"{self._path.parent} was taken over by {holder(found)}")
        return False

    def _restore(self) -> None:
        """Make the record anew where somebody has deleted it."""
        file = self._make()
        if file is not None:
            os.dup2(file, self._file, inheritable=False)
            os.close(file)

    def _write(self, file: int | None = None) -> None:
        """Write the record through its descriptor: never into one that another process made."""
        file = self._file if file is None else file
        os.pwrite(file, json.dumps(self._record | {"beats": self._beats}).encode() + b"\n", 0)
        os.fsync(file)


def lock(directory: Path) -> int:
    """Return a descriptor that holds the lock on a directory.

    Returns -1 when another process has it, or has just removed or published the directory.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), directory.stat())
    except OSError as error:
        # Without locks on a file system, nobody is known to hold one.
        is_there = error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.ENOENT)
    if is_there:
        return descriptor
    os.close(descriptor)
    return -1


def is_alive(record: dict[str, Any]) -> bool | None:
    """Tell whether the process that wrote a record is there; None when it is of another machine."""
    if record.get("machine") != _machine() or not _machine():
        return None
    return _born(record.get("pid", 0)) == record.get("born")


def identity(pid: int) -> str:
    """Return what no other process has, on this machine or another, now or later."""
    return f"{_machine()} {pid} {_born(pid)}"


def holder(record: dict[str, Any]) -> str:
    """Return in words which process wrote a record; empty when there is none."""
    return f"process {record.get('pid', '?')} on {record.get('host', '?')}" if record else ""


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
        text = Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError):  # a record may say anything
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
