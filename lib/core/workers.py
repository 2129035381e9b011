"""Run worker processes and threads that end with this process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from typing import Any

from lib.core import commands
from lib.core.errors import StageError

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # schedulers send them to every process

_STARTING = threading.Lock()  # `imports_as_here` changes the environment of the whole process

Prepare = Callable[..., Callable[[Any], Any]]


class WorkerDied(StageError):
    """Raised if a worker process has died, for example because memory ran out."""


class Worker:
    """A child process that answers tasks in the order in which they were sent.

    prepare: called in the child with `arguments`; returns the function that answers a task. Receive
    the answer to a task before sending the next one, or both sides could wait for the other to
    read. context: how the process starts. By default it is spawned, since a fork would copy threads
    and locks of this process in an undefined state.
    """

    def __init__(
        self, name: str, prepare: Prepare, *arguments: Any, context: BaseContext | None = None
    ) -> None:
        context = context or multiprocessing.get_context("spawn")
        with _STARTING:
            self._connection, child_end = context.Pipe()
            self._process = context.Process(  # type: ignore[attr-defined]
                target=_serve_tasks, args=(child_end, prepare, arguments), name=name, daemon=True
            )
            with imports_as_here():
                self._process.start()
            child_end.close()
        # This runs before multiprocessing waits for a child that ignores its SIGTERM.
        atexit.register(self.close)

    def send(self, task: Any) -> None:
        """Send a task. Raises WorkerDied if the process has died."""
        try:
            self._connection.send(task)
        except OSError:
            raise self._died() from None

    def receive(self) -> Any:
        """Return the answer to a task or raise its error. Raises WorkerDied if the child died."""
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

    def _died(self) -> WorkerDied:
        self._process.join(5)
        code = self._process.exitcode or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerDied(
            f"the worker process `{self._process.name}` has died ({cause})",
            expected="signal 9 usually means that memory ran out: try fewer --num-workers",
            run=commands.as_typed(),
        )


class Pool:
    """Worker processes that share tasks; the answers come in the order of the tasks.

    prepare, arguments, context: as for Worker.

    >>> with Pool(count, "conversations", make_encoder, tokenizer_dir) as pool:
    ...     for answer in pool.run(tasks): …
    """

    def __init__(
        self,
        count: int,
        name: str,
        prepare: Prepare,
        *arguments: Any,
        context: BaseContext | None = None,
    ) -> None:
        self._count = count
        self._make_worker = lambda: Worker(name, prepare, *arguments, context=context)
        self._is_closed = False
        self._workers: list[Worker] = []  # all that were started
        self._free: SimpleQueue[Worker | None] = SimpleQueue()  # None: not started
        for _ in range(count):
            self._free.put(self._start_worker())
        self._threads = ThreadPoolExecutor(count)  # each waits for the answer of a worker

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, tasks: Iterable[Any], on_death: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Yield the answer to each task in order, or raise its error.

        At most two tasks per worker are started ahead. on_death: called with a task whose worker
        has died, while no other task runs; returns the answer. Without it, WorkerDied is raised.
        """
        pending: deque[tuple[Any, Future[Any]]] = deque()

        def take_next() -> Any:
            task, future = pending.popleft()
            try:
                return future.result()
            except WorkerDied:
                if on_death is None:
                    raise
            wait([future for _, future in pending])
            return on_death(task)

        for task in tasks:
            pending.append((task, self._threads.submit(self.answer, task)))
            if len(pending) >= 2 * self._count:
                yield take_next()
        while pending:
            yield take_next()

    def answer(self, task: Any) -> Any:
        """Return the answer to one task or raise its error. Raises WorkerDied if its worker died.

        A dead worker is replaced before the next task.
        """
        worker = self._free.get() or self._start_worker()
        try:
            worker.send(task)
            answer = worker.receive()
        except WorkerDied:
            worker.close()
            self._free.put(None)
            raise
        except BaseException:
            self._free.put(worker)
            raise
        self._free.put(worker)
        return answer

    def close(self) -> None:
        """End all workers at once, and drop the tasks that still wait."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def _start_worker(self) -> Worker:
        worker = self._make_worker()
        self._workers.append(worker)
        if self._is_closed:  # meanwhile, so nobody else would end it
            worker.close()
        return worker


def _serve_tasks(tasks: Connection, prepare: Prepare, arguments: tuple[Any, ...]) -> None:
    """Answer tasks until the parent closes the connection or is gone."""
    _set_up_worker()
    handler: Callable[[Any], Any] | None = None
    answer: tuple[Exception | None, Any]
    with suppress(EOFError, OSError):
        while True:
            task = tasks.recv()
            try:
                handler = handler or prepare(*arguments)
                answer = None, handler(task)
            except (StageError, OSError) as error:
                answer = error, None
            except Exception:  # other exceptions may not survive pickling
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}"), None
            tasks.send(answer)


@contextmanager
def imports_as_here() -> Iterator[None]:
    """Let Python processes that start within the context import from the same places as this one.

    Otherwise they import from the working directory first, where a data file may have the name of
    a module. With Python 3.10 they still do.
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


def _set_up_worker() -> None:
    """Make a worker process ignore signals, which its parent handles, and end with its parent."""
    for number in _IGNORED:
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
