"""Write what a run records about itself: config.yaml, state.json and events.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from lib.core import code_version, commands, manifest
from lib.core.paths import Experiment
from lib.runs.events import Event, EventFile
from lib.runs.prometheus import PrometheusFile
from lib.runs.state_file import StateFile


class Journal:
    """Writes config.yaml, state.json and events.jsonl on rank 0, and nothing on other ranks.

    is_kept: False for a bench, which writes nothing on any rank. is_restart: whether a launcher has
    started this launch again. has_started: whether this launch has written state.json, so that it
    was not refused. prometheus: the writer of metrics.prom, which shows the status too.
    """

    def __init__(
        self, experiment: Experiment, rank: int, is_kept: bool = True, is_restart: bool = False
    ) -> None:
        self.experiment = experiment
        self.is_restart = is_restart
        self.has_started = False
        self.prometheus = PrometheusFile(experiment, rank, is_kept)
        self._active = rank == 0 and is_kept
        self._events = EventFile(experiment)
        self._state = StateFile(experiment, self.prometheus)

    def write_config(
        self,
        resolved: dict[str, Any],
        settled: dict[str, Any],
        defaults: dict[str, Any],
        identity: dict[str, Any],
        model_dir: Path,
        launch: str,
        run: str,
        launched_by: list[str],
    ) -> None:
        """Write config.yaml: options, versions, argv and the commit of the code.

        resolved: values of all options. settled: values of the options that were filled in.
        defaults: those of the options with other values. launch, run: IDs of this start and of the
        run. launched_by: the marks of the launch.
        """
        if not self._active:
            return
        content = {
            "launch": launch,
            "run": run,
            "launched_by": launched_by,
            "options": resolved,
            "settled": settled,
            "defaults": defaults,
            "model_dir": str(model_dir),
            "identity": identity,
            "versions": manifest.package_versions(),
            "argv": commands.redact_argv(sys.argv),
            "git_commit": code_version.find_git_commit(),
        }
        manifest.write_text(self.experiment.config, yaml.safe_dump(content, sort_keys=False))

    def write_state(self, status: str, **facts: Any) -> None:
        """Replace state.json, as StateFile does. Any thread may call this."""
        self.has_started = True
        if self._active:
            self._state.write(status, facts)

    def update_copy_state(self, **facts: Any) -> None:
        """Change the fields of state.json about the copies of checkpoints."""
        self._state.change_copies(facts)

    def add_event(self, event: Event, step: int, **facts: Any) -> None:
        """Append a line to events.jsonl, as EventFile does. Any thread may call this."""
        if self._active:
            self._events.add_event(event, step, **facts)
