"""Run worker processes and threads that end with this process."""

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
    """A child process that answers tasks in the order in which they were sent.

    prepare: called in the child with `arguments`; returns the function that answers a task. Receive
    the answer to a task before sending the next one, or both sides could wait for the other to
    read.
    """

    def __init__(
        self, name: str, prepare: Callable[..., Callable[[Any], Any]], *arguments: Any
    ) -> None:
        # Spawned: a fork would copy threads and locks of this process in an undefined state.
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, prepare, arguments), name=name, daemon=True
        )
        with imports_as_here():
            self._process.start()
        there.close()
        # Runs before multiprocessing waits for a child that ignores its SIGTERM.
        atexit.register(self.close)

    def send(self, task: Any) -> None:
        """Send a task. Raises StageError if the process has died."""
        try:
            self._connection.send(task)
        except OSError:
            raise self._died() from None

    def receive(self) -> Any:
        """Return the answer to a task or raise its error. Raises StageError if the child died."""
        try:
            error, answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """End the process at once. A second call does nothing."""
        atexit.unregister(self.close)
        self._process.kill()  # a thread that waits for an answer sees the connection end
        self._process.join()
        self._connection.close()

    def _died(self) -> StageError:
        self._process.join(5)
        code = self._process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return StageError(
            f"the worker process `{self._process.name}` has died ({how})",
            expected="signal 9 usually means that memory ran out: try fewer --num-workers",
            run=commands.as_typed(),
        )


def _serve(
    tasks: Connection, prepare: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    """Answer tasks until the parent closes the connection or is gone."""
    set_up_worker(_IGNORED)
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
            except Exception:  # other exceptions may not survive pickling
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}"), None
            tasks.send(answer)


@contextmanager
def imports_as_here() -> Iterator[None]:
    """Let Python processes that start within the context import from the same places as this one.

    Otherwise they import from the working directory first (with Python 3.10 they still do), which
    may contain data, with files of any name.
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


def set_up_worker(ignored: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
    """Let a worker process leave signals to its parent, and end with it."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def thread_pool(count: int = 1, name: str = "") -> ThreadPoolExecutor:
    """Return a pool of threads that use the current GPU of the calling thread.

    torch keeps the current GPU per thread, and a new thread begins with GPU 0. All ranks of a node
    would then meet on that GPU, on a stream that nothing else waits for.
    """
    torch = sys.modules.get("torch")  # a stage without torch uses no GPU either
    if torch is None or not torch.cuda.is_initialized():
        return ThreadPoolExecutor(count, thread_name_prefix=name)
    return ThreadPoolExecutor(count, name, torch.cuda.set_device, (torch.cuda.current_device(),))
