"""A process that answers tasks, tells what went wrong, and is missed when it dies."""

from __future__ import annotations

import os
import signal

import pytest

from lib.core.errors import StageError, UsageError
from lib.core.workers import Worker


def answer(task: object) -> object:
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "fail":
        raise UsageError("not so", found="this")
    return os.getpid() if task == "pid" else 1 / task


def make() -> object:
    return answer


def test_a_worker_answers_tells_errors_and_its_death():
    worker = Worker("test", make)
    worker.send(4)
    assert worker.receive() == 0.25
    worker.send("fail")
    with pytest.raises(UsageError, match="not so") as told:
        worker.receive()
    assert told.value.found == "this"
    worker.send(0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        worker.receive()
    worker.send("die")
    with pytest.raises(StageError, match="has died \\(signal 9\\)"):
        worker.receive()
    with pytest.raises(StageError, match="has died"):
        worker.send(1)
    worker.close()
