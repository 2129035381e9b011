"""Process units in worker processes; a file that crashes a worker is skipped."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from lib.core import log, workers
from lib.core.paths import escape_path
from lib.core.workers import WorkerDied
from lib.corpus import work_units
from lib.corpus.work_units import UnitResult, WorkUnit

ProcessUnit = Callable[[WorkUnit], UnitResult]

# Deeper than the nesting that orjson accepts, and far from the end of the C stack.
_RECURSION_LIMIT = 10_000


class UnitPool:
    """Processes units in worker processes and yields the results in order.

    process: the function that a worker calls with a unit.

    >>> with UnitPool(count) as pool:
    ...     for result in pool.run(units): …
    """

    def __init__(self, count: int, process: ProcessUnit = work_units.process_unit) -> None:
        self._pool = workers.Pool(count, "units", _prepare_worker, process, context=start_server())

    def __enter__(self) -> UnitPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def run(self, units: Sequence[WorkUnit]) -> Iterator[UnitResult]:
        """Yield the result of each unit in order.

        Workers are only a few units ahead of the caller, so parts do not pile up.
        """
        return self._pool.run(units, self._process_alone)

    def _process_alone(self, unit: WorkUnit) -> UnitResult:
        """Process a unit again while nothing else runs, without the files that crash the worker."""
        if result := self._try_unit(unit):
            return result
        fatal = frozenset(
            span.file.path
            for span in unit.spans
            if not self._try_unit(replace(unit, spans=(span,), is_trial=True))
        )
        for path in sorted(fatal):
            log.warn(
                f"{escape_path(path)} crashes the worker process that reads it; the file is skipped"
            )
        result = self._try_unit(replace(unit, avoid=fatal))
        if result is None:
            raise RuntimeError(f"worker processes crash on unit {unit.number} ({unit.bytes} bytes)")
        return result

    def _try_unit(self, unit: WorkUnit) -> UnitResult | None:
        try:
            return self._pool.answer(unit)
        except WorkerDied:
            return None


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


def _prepare_worker(process: ProcessUnit) -> ProcessUnit:
    """Return the function that a worker calls with a unit."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    return process
