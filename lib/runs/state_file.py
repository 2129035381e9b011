"""Write state.json, which is a hint for people and launchers; a resume ignores it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from lib.core import log, manifest, reading, records
from lib.core.errors import StageError
from lib.core.paths import Experiment
from lib.runs.figures import Status
from lib.runs.prometheus import PrometheusFile
from lib.runs.run_records import format_time, list_commits

_STEP_FIELDS = {"epoch", "tokens", "sample_cursor"}  # valid for one step


class StateFile:
    """Writes state.json of a run that trains, and shows it in metrics.prom. Any thread may call it.

    If a write fails, the log warns once, and the run goes on.
    """

    def __init__(self, experiment: Experiment, prometheus: PrometheusFile) -> None:
        self._experiment = experiment
        self._prometheus = prometheus
        self._lock = Lock()
        self._is_over = False
        self._last: dict[str, Any] = {}
        self._copies: dict[str, Any] = {}
        self._may_fail = log.WarnOnce(experiment.state.name, OSError, StageError)

    def write(self, status: str, facts: dict[str, Any]) -> None:
        """Replace the file. facts: the other fields, see STATE in lib/runs/figures.py.

        After any other status, `running` is ignored, because a save in the background may end after
        the run.
        """
        with self._lock, self._may_fail:
            self._is_over |= status != Status.RUNNING
            if status == Status.RUNNING and self._is_over:
                return
            self._last = {"status": status, **facts}
            self._write_last()

    def change_copies(self, facts: dict[str, Any]) -> None:
        """Change the fields about the copies of checkpoints."""
        with self._lock, self._may_fail:
            self._copies |= facts
            if self._last:
                self._write_last()

    def _write_last(self) -> None:
        commits = reading.with_retries(partial(list_commits, self._experiment))
        content = {
            **self._last,
            "checkpoints": [step for step, _ in commits],
            **self._copies,
            "updated": format_time(),
        }
        self._prometheus.set_state(content)
        _write_content(self._experiment.state, content)


def change_state(experiment: Experiment, **facts: Any) -> None:
    """Change fields of state.json of a run that does not train. Raises OSError if that fails."""
    _write_content(experiment.state, records.read_mapping(experiment.state) | facts)


def mark_complete(experiment: Experiment, step: int) -> None:
    """Write to state.json that a run is complete, if it crashed between its last save and that."""
    state = records.read_mapping(experiment.state)
    if log.rank() > 0 or (state.get("status"), state.get("step")) == (Status.COMPLETE, step):
        return
    if state.get("step") != step:  # drop the fields about another step
        state = {key: value for key, value in state.items() if key not in _STEP_FIELDS}
    completed = {"status": Status.COMPLETE, "step": step, "global_step": step}
    _write_content(experiment.state, state | completed)


def _write_content(path: Path, content: dict[str, Any]) -> None:
    """Replace the content of state.json. Raises OSError if that fails."""
    try:
        manifest.write_json(path, content)
    except OSError:
        # A full disk still has the space of the old file. If that fails too, the first error is
        # reported.
        if not _overwrite_file(path, json.dumps(content).encode()):
            raise


def _overwrite_file(path: Path, content: bytes) -> bool:
    """Overwrite the content of an existing file in place, and return whether that succeeded."""
    try:
        with path.open("r+b", buffering=0) as file:
            written = file.write(content)
            file.truncate(written)
    except OSError:
        return False
    return written == len(content)
