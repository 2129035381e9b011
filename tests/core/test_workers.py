# covers: lib/core/workers.py
"""Worker processes answer tasks, and report their errors and their death."""

from __future__ import annotations

import os
import signal

import pytest

from lib.core.errors import StageError, UsageError
from lib.core.workers import Pool, Worker, WorkerDied


def answer_task(task: object) -> object:
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "fail":
        raise UsageError("not so", found="this")
    return os.getpid() if task == "pid" else 1 / task


def make_answer() -> object:
    return answer_task


def test_a_worker_answers_and_reports_errors_and_its_death():
    worker = Worker("test", make_answer)
    worker.send(4)
    assert worker.receive() == 0.25
    worker.send("fail")
    with pytest.raises(UsageError, match="not so") as caught:
        worker.receive()
    assert caught.value.found == "this"
    worker.send(0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        worker.receive()
    worker.send("die")
    with pytest.raises(StageError, match="has died \\(signal 9\\)"):
        worker.receive()
    with pytest.raises(StageError, match="has died"):
        worker.send(1)
    worker.close()


def test_a_pool_answers_in_the_order_of_the_tasks():
    with Pool(3, "test", make_answer) as pool:
        assert list(pool.run(range(1, 40))) == [1 / task for task in range(1, 40)]
        assert len(set(pool.run(["pid"] * 30))) <= 3
        with pytest.raises(UsageError, match="not so"):
            list(pool.run([1, "fail", 2]))
        assert pool.answer(2) == 0.5


def test_a_pool_replaces_a_dead_worker():
    with Pool(2, "test", make_answer) as pool:
        with pytest.raises(WorkerDied, match="has died"):
            list(pool.run([1, "die", 2]))
        answers = pool.run([1, "die", 2, "die", 4], on_death=lambda task: f"{task} alone")
        assert list(answers) == [1, "die alone", 0.5, "die alone", 0.25]
    pool.close()


def test_closing_a_pool_ends_its_workers():
    with Pool(2, "test", make_answer) as pool:
        pids = set(pool.run(["pid"] * 20))
        next(pool.run(range(1, 100)))  # the other tasks are dropped
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
