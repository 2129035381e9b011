"""One process at a time: live, dead, of another machine, taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.core import lease
from lib.core.errors import UsageError
from lib.core.lease import Lease
from tests.conftest import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from lib.core.lease import Lease
Lease(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(600)
"""


def never(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock.json"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like a network file system that keeps no locks, here and in no other process."""
    monkeypatch.setattr(lease.publish, "lock", lambda directory: os.open(directory, os.O_RDONLY))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease, "PATIENCE_S", 3.0)


def of_another_machine(path: Path, beats: int = 0) -> None:
    lease.manifest.write_json(path, {"host": "elsewhere", "pid": 1, "born": "1",
                                     "machine": "another", "id": "x", "beats": beats})


def test_a_second_one_is_refused_and_told_who_holds_it(path: Path, holder: subprocess.Popen,
                                                       ) -> None:
    with pytest.raises(UsageError, match="another launch") as caught:
        Lease(path, never)
    assert f"process {holder.pid} on" in caught.value.found


def test_also_where_file_locks_do_not_work(path: Path, holder: subprocess.Popen,
                                           no_kernel_locks: None) -> None:
    with pytest.raises(UsageError, match="another launch"):
        Lease(path, never)
    os.kill(holder.pid, 19)  # SIGSTOP: it is still there
    with pytest.raises(UsageError, match="another launch"):
        Lease(path, never)


def test_a_killed_holder_is_followed_at_once(path: Path, holder: subprocess.Popen) -> None:
    holder.kill()
    holder.wait()
    assert path.exists()
    began = time.monotonic()
    Lease(path, never).release()
    assert time.monotonic() - began < 1
    assert not path.exists()


def test_the_same_pid_later_is_another_process(path: Path) -> None:
    Lease(path, never).release()
    lease.manifest.write_json(path, {"host": "h", "pid": os.getpid(), "born": "1", "id": "x",
                                     "machine": lease._machine()})
    Lease(path, never).release()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_torn_record_hinders_nobody(path: Path, content: str) -> None:
    path.write_text(content)
    Lease(path, never).release()


def test_a_dead_holder_elsewhere_is_waited_for_and_followed(path: Path, fast: None) -> None:
    of_another_machine(path)
    began = time.monotonic()
    Lease(path, never).release()
    assert time.monotonic() - began >= 3


def test_a_live_holder_elsewhere_is_respected(path: Path, fast: None) -> None:
    of_another_machine(path)
    threading.Timer(0.5, of_another_machine, (path, 1)).start()
    with pytest.raises(UsageError, match="another launch") as caught:
        Lease(path, never)
    assert "process 1 on elsewhere" in caught.value.found


def test_who_is_taken_over_hears_of_it(path: Path, fast: None) -> None:
    told, heard = [], threading.Event()

    def lost(text: str) -> None:
        told.append(text)
        heard.set()

    held = Lease(path, lost)
    of_another_machine(path)
    assert heard.wait(10) and "taken over by process 1 on elsewhere" in told[0]
    held.release()
    assert json.loads(path.read_text())["host"] == "elsewhere", "not ours to delete any more"


def test_it_beats(path: Path, fast: None) -> None:
    held = Lease(path, never)
    seen = set()
    deadline = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(json.loads(path.read_text())["beats"])
    held.release()
    assert len(seen) == 3
