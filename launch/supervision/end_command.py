"""Run the command of --on-end when a launch is over, on node 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from lib.core import run_records
from lib.core.errors import EXIT_DONE
from lib.core.paths import Experiment
from lib.train.config import Config


class EndCommand:
    """The command of --on-end, which runs in a thread, so that the launcher can continue."""

    def __init__(self, config: Config, experiment: Experiment) -> None:
        trains = not (config.prepare_only or config.dry_run or config.bench)
        self._command = config.on_end if trains else ""
        self._seconds = config.on_end_seconds
        self._experiment = experiment
        self._state_before = run_records.read_state(experiment.state)
        self._thread: Thread | None = None
        self._deadline = 0.0

    def start(self, code: int, reason: str, announce: Callable[[str], None]) -> None:
        """Start the command, unless the run was complete before this launch.

        code: exit code of the launch. reason: explains the code. announce: prints the outcome.
        """
        is_new = run_records.read_state(self._experiment.state) != self._state_before
        if not self._command or (code == EXIT_DONE and not is_new):
            return
        from lib.train.output import on_end  # a launcher keeps its memory small

        def run() -> None:
            announce(
                on_end.run_command(
                    self._command,
                    self._seconds,
                    self._experiment,
                    on_end.make_ending(code, reason),
                    on_end.build_user_environment(),
                )
            )

        self._deadline = time.monotonic() + self._seconds + on_end.KILL_S
        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Return whether to wait for the command; after a deadline, do not: a disk may hang."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return is_alive and time.monotonic() < self._deadline
