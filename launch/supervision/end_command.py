"""Run the command of --on-end when a launch is over, on node 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

from lib.core import offline
from lib.core.errors import EXIT_DONE
from lib.core.paths import Experiment
from lib.runs import run_records


class EndCommand:
    """The command of --on-end, which runs in a thread, so that the launcher can continue."""

    def __init__(self, command: str, seconds: float, experiment: Experiment) -> None:
        """command: for the shell; "" runs nothing. seconds: after which it is killed."""
        self._command = command
        self._seconds = seconds
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
        from launch.supervision import on_end  # a launcher keeps its memory small

        def run() -> None:
            announce(
                on_end.run_command(
                    self._command,
                    self._seconds,
                    self._experiment,
                    on_end.make_ending(code, reason),
                    offline.build_user_environment(),
                )
            )

        self._deadline = time.monotonic() + self._seconds + on_end.KILL_S
        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Return whether to wait for the command; after a deadline, do not: a disk may hang."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return is_alive and time.monotonic() < self._deadline
