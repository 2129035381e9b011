"""Write report.html of a run in a child process, for which the run does not wait while it trains.

The child process has the lowest priority, its own session and a time limit. It reads only files,
and replaces the page by a rename. So it can end at any point, and nothing that it does changes the
run.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock

from lib.core import log, offline
from lib.core.paths import Experiment

_ROOT = Path(__file__).resolve().parents[3]
# `-m` would search the current directory of the user first. An alarm ends the process even if a
# file system hangs for a while.
_PROGRAM = (
    "import sys; sys.path[0] = sys.argv.pop(1); import os, runpy, signal; os.nice(19); "
    "signal.alarm(int(sys.argv.pop(1))); runpy.run_module('lib.report', run_name='__main__')"
)
_LONGEST_S = 120
_PATIENCE_S = 10.0  # the longest wait for the page at the end of a run
# More threads would take processor time from the ranks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class PageWriter:
    """Starts the child processes that write report.html. Any thread may use it.

    is_active: False on all ranks except 0 and for a bench; then no page is written.
    """

    def __init__(self, experiment: Experiment, is_active: bool) -> None:
        self._root = experiment.root.absolute()
        self._is_active = is_active
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        self._may_fail = log.WarnOnce(experiment.report.name, Exception)

    @property
    def is_failing(self) -> bool:
        """Return whether a child process that has ended could not write the last page."""
        return self._may_fail.is_failing

    def start(self, is_last: bool = False) -> None:
        """Start to write the page, unless an earlier child process is still writing it.

        is_last: replace that process, because the files have changed since it read them.
        """
        if not self._is_active:
            return
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                if not is_last:
                    return
                self._process.kill()
            else:
                self._note_outcome()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(_ROOT), str(_LONGEST_S), str(self._root)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=offline.build_user_environment() | _ONE_THREAD,
                    start_new_session=True,
                )
            except OSError as error:
                self._process = None
                self._warn(error)

    def finish(self) -> None:
        """Write the last page, and wait for it for some seconds. Raises nothing."""
        self.start(is_last=True)
        with self._lock:
            if self._process is None:
                return
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._warn(TimeoutError(f"that takes more than {_PATIENCE_S:g} s"))
            else:
                self._note_outcome()

    def _note_outcome(self) -> None:
        """Warn if the last process has failed, with the line of its output that says why."""
        process = self._process
        self._process = None
        if process is None or process.stderr is None:
            return
        lines = [b""]
        with process.stderr, suppress(OSError):
            lines += process.stderr.read().strip().splitlines()
        line = next((line for line in lines if line.startswith(b"error: ")), lines[-1])
        reason = line.decode("utf-8", "replace").removeprefix("error: ")
        reason = reason or f"exit code {process.returncode}"
        self._warn(OSError(reason) if process.returncode else None)

    def _warn(self, error: Exception | None) -> None:
        """Log an error once. error: None if the page was written; the next error is then logged."""
        with self._may_fail:
            if error is not None:
                raise error
