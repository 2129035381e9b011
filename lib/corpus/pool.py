"""Run worker processes that end with their parent; a file that crashes a worker is skipped."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from lib.core import log, workers
from lib.corpus import work_units
from lib.corpus.scan import escape_path
from lib.corpus.work_units import UnitResult, WorkUnit

Work = Callable[[WorkUnit], UnitResult]

# Deeper than the nesting that orjson accepts, and far from the end of the C stack.
_RECURSION_LIMIT = 10_000


class Pool:
    """Process units in worker processes and yield the results in order.

    work: function that a worker calls with a unit.

    >>> with Pool(workers) as pool:
    ...     for done in pool.run(units): …
    """

    def __init__(self, workers: int, work: Work = work_units.process_unit) -> None:
        self._workers = workers
        self._work = work
        self._executor = _make_executor(workers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, units: Sequence[WorkUnit]) -> Iterator[UnitResult]:
        """Yield the result of each unit; few units run ahead, so that parts do not pile up."""
        pending: dict[int, Future[UnitResult]] = {}
        ahead = 2 * self._workers
        for position, unit in enumerate(units):
            for later in range(position, min(position + ahead, len(units))):
                if later not in pending:
                    pending[later] = self._submit(units[later])
            try:
                done = pending.pop(position).result()
            except BrokenProcessPool:
                done = _process_alone(self._work, unit)
                # Some units of the broken pool had finished before the crash.
                pending = {
                    later: future
                    for later, future in pending.items()
                    if future.done() and not future.cancelled() and future.exception() is None
                }
            yield done

    def _submit(self, unit: WorkUnit) -> Future[UnitResult]:
        try:
            return self._executor.submit(self._work, unit)
        except BrokenProcessPool:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = _make_executor(self._workers)
            return self._executor.submit(self._work, unit)


def _make_executor(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, start_server(), _set_up_worker)


@cache
def start_server() -> BaseContext:
    """Start the fork server of the workers and return its context.

    The server has imported the workers' modules, so a worker starts in milliseconds. It runs no
    threads and takes no locks, so forking it is safe. It uses the module path of this process.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise importing numpy starts threads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lib.corpus.pool", "lib.corpus.readers", "pyarrow"])
    with workers.imports_as_here():
        forkserver.ensure_running()
    return context


def _set_up_worker() -> None:
    sys.setrecursionlimit(_RECURSION_LIMIT)
    workers.set_up_worker()


def _process_alone(work: Work, unit: WorkUnit) -> UnitResult:
    """Process a unit again while nothing else runs, without the files that crash the process."""
    if done := _try_unit(work, unit):
        return done
    fatal = frozenset(
        span.file.path for span in unit.spans if not _try_unit(work, replace(unit, spans=(span,)))
    )
    for path in sorted(fatal):
        log.warn(f"{escape_path(path)} crashes the worker process that reads it; it is skipped")
    done = _try_unit(work, replace(unit, avoid=fatal))
    if done is None:
        raise RuntimeError(f"worker processes crash on unit {unit.number} ({unit.bytes} bytes)")
    return done


def _try_unit(work: Work, unit: WorkUnit) -> UnitResult | None:
    with _make_executor(1) as executor:
        try:
            return executor.submit(work, unit).result()
        except BrokenProcessPool:
            return None
