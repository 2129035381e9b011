# covers: lib/core/lease.py
"""One process holds a lease; others are refused, or take it over from a dead holder."""

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
    monkeypatch.setattr(lease, "lock_path", lambda directory: os.open(directory, os.O_RDONLY))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease, "PATIENCE_S", 3.0)
    monkeypatch.setattr(lease, "SETTLE_S", 0.3)
    monkeypatch.setattr(lease, "_POLL_S", 0.2)


def write_foreign_record(path: Path, beats: int = 0) -> None:
    manifest.write_json(
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


def test_a_second_process_is_refused_and_the_holder_named(
    path: Path, holder: subprocess.Popen
) -> None:
    with pytest.raises(UsageError, match="another process") as caught:
        Lease(path, never)
    assert f"process {holder.pid} on" in caught.value.found


def test_a_second_process_is_refused_without_kernel_locks(
    path: Path, holder: subprocess.Popen, no_kernel_locks: None
) -> None:
    with pytest.raises(UsageError, match="another process"):
        Lease(path, never)
    os.kill(holder.pid, 19)  # SIGSTOP: it is still there
    with pytest.raises(UsageError, match="another process"):
        Lease(path, never)


def test_the_lease_of_a_killed_holder_is_taken_at_once(
    path: Path, holder: subprocess.Popen
) -> None:
    holder.kill()
    holder.wait()
    assert path.exists()
    Lease(path, never).release()
    assert not path.exists()


def test_a_reused_pid_is_another_process(path: Path) -> None:
    Lease(path, never).release()
    manifest.write_json(
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
def test_a_torn_record_does_not_block(path: Path, content: str, fast: None) -> None:
    path.write_text(content)
    Lease(path, never).release()


def test_a_silent_holder_on_another_machine_is_replaced_after_a_wait(
    path: Path, fast: None
) -> None:
    write_foreign_record(path)
    began = time.monotonic()
    Lease(path, never).release()
    assert time.monotonic() - began >= 3


def test_a_live_holder_on_another_machine_keeps_the_lease(path: Path, fast: None) -> None:
    write_foreign_record(path)
    threading.Timer(0.5, write_foreign_record, (path, 1)).start()
    with pytest.raises(UsageError, match="another process") as caught:
        Lease(path, never)
    assert "process 1 on elsewhere" in caught.value.found


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, no_kernel_locks: None, fast: None) -> threading.local:
    """Let each thread act as one node (its attribute `name`) whose locks others do not see."""
    here = threading.local()
    monkeypatch.setattr(liveness, "machine_identity", lambda: here.name)
    return here


@pytest.mark.parametrize("leftover", ["nothing", "dead", "torn"])
def test_one_of_many_nodes_gets_the_lease(
    path: Path, nodes: threading.local, leftover: str
) -> None:
    """Locks are local to a node here. The others are refused before the next beat."""
    if leftover == "torn":
        path.write_text("{")
    elif leftover != "nothing":
        manifest.write_json(
            path,
            {"host": "gone", "pid": 1, "machine": "gone", "id": "x", "beats": 7},
        )
    start = threading.Barrier(8)
    leases = []
    refused = []

    def take(number: int) -> None:
        nodes.name = f"node {number}"
        start.wait()
        try:
            leases.append(Lease(path, never))
        except lease.DirectoryHeld as held:
            refused.append(held)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 1 and len(refused) == 7
    assert all(held.holder for held in refused)
    leases[0].release()
    assert not list(path.parent.iterdir())


def test_leases_work_without_hard_links(
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
    held.release()
    Lease(path, never).release()


def test_the_error_survives_pickling_for_other_ranks() -> None:
    error = lease.ExperimentHeld("another launch", holder="process 5 on box", hint="wait for it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is lease.ExperimentHeld and copy.holder == error.holder
    assert copy.render() == error.render()


def test_a_late_holder_does_not_write_into_the_new_record(path: Path, fast: None) -> None:
    """A process that was suspended keeps writing, but only to its own, replaced record."""
    messages: list[str] = []
    held = Lease(path, messages.append)
    held._ended.set()
    held._thread.join()
    write_foreign_record(path)
    before = path.read_bytes()
    held._write()
    assert path.read_bytes() == before
    held.release()
    assert "by process 1 on elsewhere" in messages[0]


def test_a_deleted_record_is_restored(path: Path, fast: None) -> None:
    held = Lease(path, never)
    path.unlink()
    deadline = time.monotonic() + 10
    while records.read_mapping(path).get("beats", 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert records.read_mapping(path)["beats"] >= 2
    held.release()
    assert not list(path.parent.iterdir())


def test_the_old_holder_is_notified(path: Path, fast: None) -> None:
    messages = []
    is_lost = threading.Event()

    def lost(text: str) -> None:
        messages.append(text)
        is_lost.set()

    held = Lease(path, lost)
    write_foreign_record(path)
    assert is_lost.wait(10) and "by process 1 on elsewhere" in messages[0]
    held.release()
    assert json.loads(path.read_text())["host"] == "elsewhere", (
        "the record of another process was deleted"
    )


def test_the_holder_updates_its_record(path: Path, fast: None) -> None:
    held = Lease(path, never)
    seen = set()
    deadline = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(json.loads(path.read_text())["beats"])
    held.release()
    assert len(seen) == 3
