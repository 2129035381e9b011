"""Processes and threads that work beside this one, and end with it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from lib.core import commands
from lib.core.errors import StageError

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # schedulers send them to every process


class Worker:
    """Answers tasks in the order in which they were sent, in a process of its own.

    prepare: called there with `arguments`; returns what answers a task. Send no second task before
    the answer to the first is received: both sides could wait for the other to read.
    """

    def __init__(
        self, name: str, prepare: Callable[..., Callable[[Any], Any]], *arguments: Any
    ) -> None:
        # Not forked: threads and locks of this process are not copied half-way.
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, prepare, arguments), name=name, daemon=True
        )
        with imports_as_here():
            self._process.start()
        there.close()
        # Before multiprocessing would wait for what its SIGTERM does not end.
        atexit.register(self.close)

    def send(self, task: Any) -> None:
        """Hand over a task; StageError when the process has died."""
        try:
            self._connection.send(task)
        except OSError:
            raise self._died() from None

    def receive(self) -> Any:
        """Return the answer to a task or raise what it raised; StageError when the process died."""
        try:
            error, answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """End the process, whatever it is at; nothing the second time."""
        atexit.unregister(self.close)
        self._process.kill()  # a thread that waits for an answer sees the end of it
        self._process.join()
        self._connection.close()

    def _died(self) -> StageError:
        self._process.join(5)
        code = self._process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return StageError(
            f"the worker process `{self._process.name}` has died ({how})",
            expected="signal 9 mostly means that memory ran out: fewer --num-workers",
            run=commands.as_typed(),
        )


def _serve(
    tasks: Connection, prepare: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    """Answer tasks until the other side closes, or is gone."""
    set_up(_IGNORED)
    handler: Callable[[Any], Any] | None = None
    answer: tuple[Exception | None, Any]
    with suppress(EOFError, OSError):
        while True:
            task = tasks.recv()
            try:
                handler = handler or prepare(*arguments)
                answer = None, handler(task)
            except StageError as error:
                answer = error, None
            except Exception:  # what others raise may not survive the way back
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}"), None
            tasks.send(answer)


@contextmanager
def imports_as_here() -> Iterator[None]:
    """Have the Python processes that start within look for modules where this one does.

    Without it they look in the working directory first (and do with Python 3.10), which may be one
    of data, with files of any name.
    """
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.pop(name, None) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def set_up(ignored: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
    """Do what every worker process does first: leave signals to its parent, and not outlive it."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def thread_pool(count: int = 1, name: str = "") -> ThreadPoolExecutor:
    """Return threads whose current GPU is that of the thread that makes them.

    torch keeps the current GPU per thread, and a new thread has number 0: what every rank of a node
    does there would meet on that one, on a stream that nothing else waits for.
    """
    torch = sys.modules.get("torch")  # a stage that has not imported it has no GPU either
    if torch is None or not torch.cuda.is_initialized():
        return ThreadPoolExecutor(count, thread_name_prefix=name)
    return ThreadPoolExecutor(count, name, torch.cuda.set_device, (torch.cuda.current_device(),))
