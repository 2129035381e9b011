# covers: lib/core/liveness.py
"""Find out which processes are alive, by the kernel or by values that they keep changing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lib.core import liveness
from lib.core.liveness import SilenceClock


def test_a_process_is_found_with_its_parent_until_it_has_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        process = liveness.read_process(child.pid)
        assert process and (process.pid, process.parent) == (child.pid, os.getpid())
        record = liveness.process_record(child.pid)
        assert liveness.is_alive(record) is True
        assert liveness.is_alive(record | {"born": "1"}) is False  # the number was used again
        assert liveness.is_alive(record | {"machine": "another"}) is None
        child.kill()
    assert liveness.is_alive(record) is False
    assert liveness.start_time(child.pid) is None


@pytest.mark.parametrize("pid", ["x", None, [], 0, -1, 1 << 40])
def test_a_record_may_contain_any_number(pid: object) -> None:
    assert liveness.read_process(pid) is None


def test_descendants_contain_children_of_children() -> None:
    program = "import subprocess; subprocess.run(['sh', '-c', 'echo up; sleep 600; true'])"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        below = liveness.list_descendants(child.pid)
        everything = {process.pid for process in liveness.list_descendants(os.getpid())}
        assert len(below) >= 1 and {child.pid, *(process.pid for process in below)} <= everything
        for process in below:
            os.kill(process.pid, 9)
        child.wait()


def test_silence_counts_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now)
    clock = SilenceClock(longest_gap=5.0)
    for seconds, value, silence in (
        (1.0, "a", 0.0),
        (2.0, "a", 2.0),
        (900.0, "a", 7.0),  # this process itself was suspended
        (1.0, "b", 0.0),
        (3.0, "b", 3.0),
    ):
        now += seconds
        clock.look()
        clock.note("node", value)
        assert clock.silence("node") == silence
    assert clock.has_changed("node")


def test_only_a_value_that_changes_shows_life() -> None:
    clock = SilenceClock()
    assert not clock.has_changed("node") and clock.silence("node") == 0
    for value, is_alive in (("old", False), ("old", False), ("new", True), (None, False)):
        clock.look()
        clock.note("node", value)
        assert clock.has_changed("node") == is_alive
