"""Let only one process at a time write a directory, even if file locks do not work there.

A kernel lock (flock) is exact on one machine, and on network file systems that support it. Some are
mounted without that support, and some keep locks within one node. So the holder also writes a
record that all machines see (host, pid, boot id), and keeps changing it. Only one process can
create the record, since linking to an existing name fails on every file system. A process that
finds a record of its own machine asks the kernel about the holder. Otherwise it waits to see
whether the record still changes. Clocks of machines are not compared.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lib.core import liveness, log, records
from lib.core.errors import UsageError
from lib.core.retry import poll

BEAT_S = 10.0
PATIENCE_S = 35.0  # without a beat, until a record of another machine counts as abandoned
SETTLE_S = 1.0  # within which two processes that take over the same record notice each other
_POLL_S = 1.0
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryHeld(UsageError):
    """Another process holds the directory. holder: a text about that process, empty if unknown."""

    def __init__(self, problem: str, *, holder: str = "", hint: str = "") -> None:
        super().__init__(problem, found=holder, hint=hint)
        self.holder = holder


class ExperimentHeld(DirectoryHeld):
    """Another launch trains the experiment. A launcher knows this class by its name."""


class Lease:
    """Holds the right to write a directory, until `release` or the end of the process.

    lost: called in a thread when another process has taken over the directory, which happens if
    this process was stopped for longer than PATIENCE_S.
    """

    def __init__(self, path: Path, lost: Callable[[str], None]) -> None:
        """Take the directory that contains the record `path`, for this process alone.

        Raises DirectoryHeld if another process holds it, and FileNotFoundError if it is gone.
        """
        self._path = path
        self._lost = lost
        self._beats = 0
        self._record = make_record()
        self._lock = lock_path(path.parent)
        if self._lock < 0:
            raise self._make_held_error(records.read_mapping(path))
        try:
            self._file = self._take()
        except BaseException:
            os.close(self._lock)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others take the directory, after checking once more that this process owns it."""
        self._ended.set()
        self._thread.join()
        if self._is_own():
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        os.close(self._lock)

    def _make_held_error(self, record: dict[str, Any]) -> DirectoryHeld:
        return DirectoryHeld(
            f"another process uses {self._path.parent} now", holder=describe_holder(record)
        )

    def _take(self) -> int:
        """Create the record and return its descriptor.

        Raises DirectoryHeld if another process holds the directory.
        """
        is_shared = False
        file = None
        while file is None:
            if self._path.exists():
                record = records.read_mapping(self._path)
                is_shared = self._require_abandoned(record)
                self._remove_record(record)
            file = self._create()
        if is_shared:  # by then another process that took over the same record is visible
            time.sleep(SETTLE_S)
            if (now := records.read_mapping(self._path)).get("id") != self._record["id"]:
                os.close(file)
                raise self._make_held_error(now)
        return file

    def _create(self) -> int | None:
        """Create the record and return its descriptor; None if there is one already."""
        temporary = self._path.with_name(f"{self._path.name}.{self._record['id']}")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        is_created = False
        try:
            self._write(file)
            try:
                os.link(temporary, self._path)
                is_created = True
            except FileExistsError:  # a file server may also report this for a link it just made
                with suppress(FileNotFoundError):
                    is_created = os.path.samestat(self._path.stat(), os.fstat(file))
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.close(file)
                file = -1
                with suppress(FileExistsError):
                    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                    self._write(file)
                    is_created = True
        finally:
            temporary.unlink(missing_ok=True)
            if not is_created and file >= 0:
                os.close(file)
        return file if is_created else None

    def _require_abandoned(self, earlier: dict[str, Any]) -> bool:
        """Wait until a record is known to be abandoned.

        Returns whether another machine may be taking it over as well. Raises DirectoryHeld if its
        holder is alive.
        """
        if (alive := liveness.is_alive(earlier)) is not None:
            if alive:
                raise self._make_held_error(earlier)
            return False
        # An unreadable record is being written at this moment, or was torn by a power failure.
        patience = PATIENCE_S if earlier else SETTLE_S
        began = time.monotonic()
        is_logged = False

        def is_released() -> bool:
            """Return whether the record is gone. Raises DirectoryHeld if it has changed."""
            nonlocal is_logged
            if (now := records.read_mapping(self._path)) != earlier:
                if now:
                    raise self._make_held_error(now)
                return True
            if not is_logged and time.monotonic() - began > BEAT_S:
                is_logged = True
                log.info(
                    f"{self._path} belongs to {describe_holder(earlier)}, which has shown no sign "
                    f"of life for {BEAT_S:.0f} s: waiting {PATIENCE_S:.0f} s in all"
                )
            return False

        if not poll(is_released, _POLL_S, patience) and earlier:
            log.info(f"{describe_holder(earlier)} is gone: taking over {self._path.parent}")
        return True

    def _remove_record(self, earlier: dict[str, Any]) -> None:
        """Remove an earlier record, but not a record that has replaced it."""
        renamed = self._path.with_name(f"{self._path.name}.{self._record['id']}.old")
        try:
            self._path.rename(renamed)
        except FileNotFoundError:
            return
        if records.read_mapping(renamed) != earlier:  # the record of a process that was faster
            with suppress(OSError):
                os.link(renamed, self._path)
        renamed.unlink()

    def _beat(self) -> None:
        may_fail = log.WarnOnce(str(self._path))  # the kernel lock is still held then
        while not self._ended.wait(BEAT_S):
            with may_fail:
                if not self._is_own():
                    return
                self._beats += 1
                if not self._path.exists():
                    self._restore()
                self._write()

    def _is_own(self) -> bool:
        """Return whether the record is still this process's. Otherwise call `lost`."""
        record = records.read_mapping(self._path)
        if record.get("id", self._record["id"]) == self._record["id"]:
            return True
        self._lost(f"{self._path.parent} was taken over by {describe_holder(record)}")
        return False

    def _restore(self) -> None:
        """Create the record again after somebody has deleted it."""
        file = self._create()
        if file is not None:
            os.dup2(file, self._file, inheritable=False)
            os.close(file)

    def _write(self, file: int | None = None) -> None:
        """Write the record through its descriptor, never into another process's record."""
        file = self._file if file is None else file
        os.pwrite(file, json.dumps(self._record | {"beats": self._beats}).encode() + b"\n", 0)
        os.fsync(file)


def lock_to_build(record: Path) -> ExitStack:
    """Lock the directory of `record` until the result is closed, or this process has ended.

    The record then names this process. The lock on the directory is exact on one machine. The lock
    on the record also excludes other machines, on file systems that support it, such as NFS.
    Raises DirectoryHeld if another process holds one of them, or has just deleted the directory.
    """
    with ExitStack() as stack:
        for path, flags in ((record.parent, os.O_RDONLY), (record, os.O_RDWR | os.O_CREAT)):
            if (descriptor := lock_path(path, flags)) < 0:
                holder = describe_holder(records.read_mapping(record))
                raise DirectoryHeld(f"another process uses {record.parent} now", holder=holder)
            stack.callback(os.close, descriptor)
        # Through the descriptor with the lock: SMB refuses to write through another one.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(make_record()).encode(), 0)
        return stack.pop_all()


def lock_path(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor that holds the kernel lock on a directory, or on a file.

    Returns -1 if another process holds it, or has just removed or published the directory.
    """
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        # Without locks on a file system, no process is known to hold one.
        is_there = error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.ENOENT)
    if is_there:
        return descriptor
    os.close(descriptor)
    return -1


def make_record() -> dict[str, Any]:
    """Return the values by which others recognise this process as the holder."""
    return {
        "host": platform.node(),
        **liveness.process_record(os.getpid()),
        "id": f"{time.time_ns():x}-{os.getpid()}",
    }


def describe_holder(record: dict[str, Any]) -> str:
    """Return a text about the process that wrote a record; empty without a record."""
    return f"process {record.get('pid', '?')} on {record.get('host', '?')}" if record else ""
