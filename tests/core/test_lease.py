"""One process at a time: live, dead, of another machine, taken over."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.core import lease, liveness, manifest, records
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
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like a network file system that keeps no locks, here and in no other process."""
    monkeypatch.setattr(lease, "lock_directory", lambda directory: os.open(directory, os.O_RDONLY))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease, "PATIENCE_S", 3.0)
    monkeypatch.setattr(lease, "SETTLE_S", 0.3)
    monkeypatch.setattr(lease, "_POLL_S", 0.2)


def of_another_machine(path: Path, beats: int = 0) -> None:
    write(
        path,
        {
            "host": "elsewhere",
            "pid": 1,
            "born": "1",
            "machine": "another",
            "id": "x",
            "beats": beats,
        },
    )


def write(path: Path, record: dict) -> None:
    manifest.write_json(path, record)


def test_a_second_one_is_refused_and_told_who_holds_it(
    path: Path, holder: subprocess.Popen
) -> None:
    with pytest.raises(UsageError, match="another process") as caught:
        Lease(path, never)
    assert f"process {holder.pid} on" in caught.value.found


def test_also_where_file_locks_do_not_work(
    path: Path, holder: subprocess.Popen, no_kernel_locks: None
) -> None:
    with pytest.raises(UsageError, match="another process"):
        Lease(path, never)
    os.kill(holder.pid, 19)  # SIGSTOP: it is still there
    with pytest.raises(UsageError, match="another process"):
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
    write(
        path,
        {
            "host": "h",
            "pid": os.getpid(),
            "born": "1",
            "id": "x",
            "machine": liveness.machine_identity(),
        },
    )
    Lease(path, never).release()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_torn_record_hinders_nobody(path: Path, content: str, fast: None) -> None:
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
    with pytest.raises(UsageError, match="another process") as caught:
        Lease(path, never)
    assert "process 1 on elsewhere" in caught.value.found


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, no_kernel_locks: None, fast: None) -> threading.local:
    """Let each thread act as one node (its attribute `name`) whose locks others do not see."""
    here = threading.local()
    monkeypatch.setattr(liveness, "machine_identity", lambda: here.name)
    return here


@pytest.mark.parametrize("left", ["nothing", "dead", "released", "torn"])
def test_of_many_nodes_at_once_one_gets_it(path: Path, nodes: threading.local, left: str) -> None:
    """Where locks are local to a node; before anyone has written, not at the next beat."""
    if left == "torn":
        path.write_text("{")
    elif left != "nothing":
        write(
            path,
            {"host": "gone", "pid": 1, "machine": "gone", "id": "x", "beats": 7}
            | ({"released": True} if left == "released" else {}),
        )
    start = threading.Barrier(8)
    got = []
    refused = []

    def take(number: int) -> None:
        nodes.name = f"node {number}"
        start.wait()
        try:
            got.append(Lease(path, never))
        except lease.DirectoryHeld as held:
            refused.append(held)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    assert all(held.holder for held in refused)
    got[0].release()
    assert not list(path.parent.iterdir())


def test_without_hard_links(
    path: Path, nodes: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    nodes.name = "first"
    held = Lease(path, never)
    nodes.name = "second"
    with pytest.raises(lease.DirectoryHeld, match="another process"):
        Lease(path, never)
    held.release(keep=True)
    Lease(path, never).release()


def test_other_ranks_raise_what_the_first_one_was_refused_with() -> None:
    error = lease.ExperimentHeld("another launch", holder="process 5 on box", hint="wait for it")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is lease.ExperimentHeld and there.holder == error.holder
    assert there.render() == error.render()


def test_who_comes_back_late_writes_nothing_into_the_record_of_another(
    path: Path, fast: None
) -> None:
    """A process that slept through its own end keeps writing, but to what nobody reads."""
    told: list[str] = []
    held = Lease(path, told.append)
    held._ended.set()
    held._thread.join()
    of_another_machine(path)
    before = path.read_bytes()
    held._write()
    assert path.read_bytes() == before
    held.stop()
    assert "taken over by process 1 on elsewhere" in told[0]


def test_a_record_that_was_deleted_comes_back(path: Path, fast: None) -> None:
    held = Lease(path, never)
    path.unlink()
    deadline = time.monotonic() + 10
    while records.read_mapping(path).get("beats", 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert records.read_mapping(path)["beats"] >= 2
    held.release()
    assert not list(path.parent.iterdir())


def test_who_is_taken_over_hears_of_it(path: Path, fast: None) -> None:
    told = []
    heard = threading.Event()

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
