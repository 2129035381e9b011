# covers: lib/core/lease.py
"""One process locks what it builds, until it ends in any way; others learn who it is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lib.core import lease
from lib.core.lease import DirectoryHeld, lock_to_build
from lib.core.retry import poll
from tests.conftest import ROOT

HOLDER = """
import os, sys, time
from pathlib import Path
from lib.core import lease
lock = lease.lock_to_build(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "lock.json"


@pytest.fixture
def holder(record: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """Hold the lock in a process that has forked a child; return both."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(record)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    child = int(process.stdout.readline())
    yield process, child
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def is_held_by(record: Path, pid: int) -> bool:
    """Return whether the lock is held, and require that the error names its holder."""
    try:
        lock_to_build(record).close()
    except DirectoryHeld as held:
        assert held.holder == f"process {pid} on {os.uname().nodename}"
        return True
    return False


def test_a_lock_is_held_until_its_process_and_those_forked_from_it_end(
    record: Path, holder: tuple[subprocess.Popen, int]
) -> None:
    """A worker process may still write after the builder was killed."""
    process, child = holder
    assert is_held_by(record, process.pid)
    process.send_signal(signal.SIGSTOP)
    assert is_held_by(record, process.pid)
    process.kill()
    process.wait()
    assert is_held_by(record, process.pid)
    os.kill(child, signal.SIGKILL)
    assert poll(lambda: not is_held_by(record, process.pid), 0.05, 60)


def test_a_record_alone_excludes_others(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks no directories. A record that was deleted before it was locked excludes nobody."""
    monkeypatch.setattr(fcntl, "flock", ignore(Path.is_dir))
    with lock_to_build(record):
        assert is_held_by(record, os.getpid())
    flock = fcntl.flock

    def delete(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        record.unlink(missing_ok=True)

    monkeypatch.setattr(fcntl, "flock", delete)
    assert lease.lock_path(record, os.O_RDWR | os.O_CREAT) == -1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_directory_excludes_processes_of_the_machine_where_files_have_no_locks(
    record: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", ignore(Path.is_file, OSError(code, os.strerror(code))))
    with lock_to_build(record):
        assert is_held_by(record, os.getpid())
    lock_to_build(record).close()


def ignore(
    is_ignored: Callable[[Path], bool], error: OSError | None = None
) -> Callable[[int, int], None]:
    """Return an `flock` that does nothing, or raises an error, for files or for directories."""
    flock = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        if not is_ignored(Path(f"/proc/self/fd/{descriptor}")):
            flock(descriptor, operation)
        elif error:
            raise error

    return lock


def test_the_record_is_written_where_the_lock_is(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB refuses to write a locked file through another descriptor, even of the same process."""

    def refuse(path: Path, *_: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    record.write_text("a longer record of a process that ended" * 9)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    with lock_to_build(record):
        monkeypatch.undo()
        assert json.loads(record.read_text())["pid"] == os.getpid()
