"""Count the file operations below a directory, and cause a fault at one of them.

Operations are create, write, fsync, rename, link, mkdir, unlink and rmdir of Python code in all
threads of this process, and on request read (a file is opened for reading).
"""
# This module watches the functions on which pathlib is built:
# ruff: noqa: PTH100, PTH104, PTH115, PTH116, PTH118, PTH120

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_open = io.open
_fsync = os.fsync
_sync = os.sync
_pwrite = os.pwrite
_sendfile = os.sendfile
# Audit event → operation, and the index of its argument with the descriptor of a directory.
_AUDIT_EVENTS = {
    "os.rename": ("rename", 2),
    "os.link": ("link", 3),
    "os.symlink": ("link", 2),
    "os.mkdir": ("mkdir", 2),
    "os.remove": ("unlink", 1),
    "os.rmdir": ("rmdir", 1),
}

_PAGE = 4096
OPERATION_KINDS = ("create", "write", "fsync", "rename", "link", "mkdir", "unlink", "rmdir")


@dataclass
class Fault:
    """A fault at the `at`-th operation (from 1) below `under`; with 0, operations are only counted.

    act: "kill" kills the process before the operation; "torn" after half of a write; "power" kills
    it and loses everything without fsync (writes are gone, renames undone); "pause" waits for
    `seconds`; the name of an errno makes the operation fail. times: number of operations with the
    fault. kinds: operations that count. match: part of the paths that count, or several with `|`
    between them. report: file that gets a line `kind path` for each operation that counts.
    """

    under: str
    at: int = 0
    act: str = "kill"
    times: int = 1
    seconds: float = 0.0
    kinds: tuple[str, ...] = OPERATION_KINDS
    match: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        self.count = 0
        self.unsynced: dict[tuple[int, int], int] = {}  # by file: its bytes after a power cut
        self.renamed: list[tuple[str, str]] = []  # renames since their directory was fsynced

    def install(self) -> None:
        """Watch this process from now on."""
        io.open = builtins.open = self._opened
        os.fsync = self._synced
        os.sync = self._all_synced
        os.pwrite = self._written_at
        os.sendfile = self._sent
        sys.addaudithook(self._audited)

    def meet(self, kind: str, path: str) -> bool:
        """Count an operation before it happens; return whether to tear a write."""
        if (
            not self.is_ours(path)
            or kind not in self.kinds
            or not any(part in path for part in self.match.split("|"))
        ):
            return False
        self.count += 1
        if self.report:
            with _open(self.report, "a") as file:
                file.write(f"{kind} {path}\n")
        if not 0 < self.at <= self.count < self.at + self.times:
            return False
        if self.act == "pause":
            time.sleep(self.seconds)
        elif self.act == "torn" and kind == "write":
            return True
        elif self.act in ("kill", "torn", "power"):
            self.die()
        else:
            number = getattr(errno, self.act)
            raise OSError(number, os.strerror(number), path)
        return False

    def die(self) -> NoReturn:
        """End this process as kill -9 or a power cut would."""
        if self.act == "power":
            for source, target in reversed(self.renamed):
                if os.path.lexists(target) and not os.path.lexists(source):
                    os.rename(target, source)
            for root, _, names in os.walk(self.under):
                for path in (os.path.join(root, name) for name in names):
                    size = self.unsynced.get(_file_key(os.stat(path)))
                    if size is not None:
                        os.truncate(path, size)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def is_ours(self, path: str) -> bool:
        """Return whether a path is below the watched directory."""
        return path.startswith(self.under) and path != self.report

    def _opened(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        path = str(file) if isinstance(file, int) else os.path.abspath(os.fspath(file))
        if not set("wax+") & set(mode):
            self.meet("read", path)
        result = _open(file, mode, *args, **options)
        return (
            _WatchedFile(result, path, self)
            if self.is_ours(str(path)) and set("wax+") & set(mode)
            else result
        )

    def _synced(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.meet("fsync", path)
        _fsync(descriptor)
        self.unsynced.pop(_file_key(os.fstat(descriptor)), None)
        self.renamed = [pair for pair in self.renamed if os.path.dirname(pair[1]) != path]

    def _all_synced(self) -> None:
        _sync()
        self.unsynced.clear()
        self.renamed.clear()

    def _written_at(self, descriptor: int, data: Any, offset: int) -> int:
        if self._wrote(descriptor):
            half = memoryview(data).cast("B")
            pages = len(half) // 2 // _PAGE * _PAGE  # direct writes consist of whole pages
            half = half[: pages or len(half) // 2]
            _pwrite(descriptor, half, offset)
            self.die()
        return _pwrite(descriptor, data, offset)

    def _sent(self, out: int, *source: Any, **options: Any) -> int:
        if self._wrote(out):
            self.die()
        return _sendfile(out, *source, **options)

    def _wrote(self, descriptor: int) -> bool:
        """Count a write that bypasses the file object; return whether to tear it."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_torn = self.meet("write", path)
        if self.is_ours(path):
            status = os.fstat(descriptor)
            self.unsynced.setdefault(_file_key(status), status.st_size)
        return is_torn

    def _audited(self, event: str, arguments: tuple) -> None:
        if (
            event == "open"
            and isinstance(arguments[0], str | bytes)
            and arguments[2] & (os.O_CREAT | os.O_TRUNC)
        ):
            self.meet("create", os.path.abspath(os.fsdecode(arguments[0])))
        if event not in _AUDIT_EVENTS:
            return
        kind = _AUDIT_EVENTS[event][0]
        directory = arguments[_AUDIT_EVENTS[event][1]]
        name = arguments[1] if kind == "link" else arguments[0]
        base = os.readlink(f"/proc/self/fd/{directory}") if directory != -1 else ""
        path = os.path.abspath(os.path.join(base, os.fsdecode(name)))
        self.meet(kind, path)
        if kind == "rename" and self.is_ours(path):
            self.renamed.append((path, os.path.abspath(os.fsdecode(arguments[1]))))


class _WatchedFile:
    """A file opened for writing whose writes are counted."""

    def __init__(self, file: Any, path: str, fault: Fault) -> None:
        self._file = file
        self._path = path
        self._fault = fault
        status = os.fstat(file.fileno())
        fault.unsynced.setdefault(_file_key(status), status.st_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _WatchedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        """Write the data, unless the fault happens instead."""
        is_torn = self._fault.meet("write", self._path)
        status = os.fstat(self._file.fileno())
        self._fault.unsynced.setdefault(_file_key(status), status.st_size)
        if is_torn:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._fault.die()
        return self._file.write(data)


def install_fault(rank: int, faults: dict[str, dict[str, Any]], clock: int) -> None:
    """Install the fault of a rank. faults: by rank. clock: seconds by which the clock is wrong."""
    # One core for each rank, so one thread computes: several threads would wait for each other on
    # a busy machine, and their number would depend on the machine.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(os.getppid() + rank) % len(cores)]})
    if clock:
        now = time.time
        now_ns = time.time_ns
        time.time = lambda: now() + clock
        time.time_ns = lambda: now_ns() + clock * 10**9
    if (fault := faults.get(str(rank))) is not None:
        Fault(**fault).install()


def _file_key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def read_operations(report: Path) -> list[tuple[str, str]]:
    """Return the operations that a fault has reported, as (kind, path)."""
    lines = report.read_text().splitlines() if report.exists() else []
    return [tuple(line.split(" ", 1)) for line in lines]
