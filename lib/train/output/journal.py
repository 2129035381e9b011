"""Write and read what a run records about itself: config.yaml, state.json and events.jsonl.

config.yaml also names the launch that wrote it. A launch begins when a person starts a run, and it
includes all restarts by a launcher. torchrun and the launchers repeat the typed options. But two
options must act only once per launch: after a restart, --overwrite would discard the launch's own
work, and --resume never would refuse it. So config.yaml contains the marks of its launch (IDs that
all processes of a launch share), and a process with one of these marks knows that it is a restart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import yaml

from lib.checkpoints import commit
from lib.core import commands, launcher, log, manifest, records
from lib.core.errors import StageError
from lib.core.paths import Experiment
from lib.runs import run_records
from lib.runs.events import Event, EventFile
from lib.runs.figures import Status
from lib.runs.prometheus import PrometheusFile
from lib.runs.run_records import format_time

if TYPE_CHECKING:  # imports torch, which a run that is complete does not wait for
    from lib.parallel.layout import ParallelLayout
    from lib.train.config import Config

_ROOT = Path(__file__).resolve().parents[3]


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
        self._lock = Lock()
        self._is_over = False
        self._last_state: dict[str, Any] = {}
        self._copy_state: dict[str, Any] = {}
        self._state_may_fail = log.WarnOnce(experiment.state.name, OSError, StageError)

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
            "git_commit": find_git_commit(),
        }
        manifest.write_text(self.experiment.config, yaml.safe_dump(content, sort_keys=False))

    def write_state(self, status: str, **facts: Any) -> None:
        """Replace state.json, which is a hint for people and launchers; a resume ignores it.

        facts: the other fields, see STATE in lib/runs/figures.py. After any other status,
        `running` is ignored, because a save in the background may end after the run. Any thread may
        call this.
        """
        self.has_started = True
        if not self._active:
            return
        with self._lock, self._state_may_fail:
            self._is_over |= status != Status.RUNNING
            if status == Status.RUNNING and self._is_over:
                return
            self._last_state = {"status": status, **facts}
            self._write_last_state()

    def update_copy_state(self, **facts: Any) -> None:
        """Change the fields of state.json about the copies of checkpoints; see `write_state`."""
        with self._lock, self._state_may_fail:
            self._copy_state |= facts
            if self._last_state:
                self._write_last_state()

    def _write_last_state(self) -> None:
        checkpoints = [c.step for c in commit.list_checkpoints(self.experiment.checkpoints)]
        content = {
            **self._last_state,
            "checkpoints": checkpoints,
            **self._copy_state,
            "updated": format_time(),
        }
        self.prometheus.set_state(content)
        try:
            manifest.write_json(self.experiment.state, content)
        except OSError:
            # A full disk still has the space of the old file. If that fails too, the first error is
            # reported.
            if not _overwrite_file(self.experiment.state, json.dumps(content).encode()):
                raise

    def add_event(self, event: Event, step: int, **facts: Any) -> None:
        """Append a line to events.jsonl, as EventFile does. Any thread may call this."""
        if self._active:
            self._events.add_event(event, step, **facts)


def _overwrite_file(path: Path, content: bytes) -> bool:
    """Overwrite the content of an existing file in place, and return whether that succeeded."""
    try:
        with path.open("r+b", buffering=0) as file:
            written = file.write(content)
            file.truncate(written)
    except OSError:
        return False
    return written == len(content)


def read_state(experiment: Experiment) -> dict[str, Any]:
    """Return the content of state.json, empty if the file is missing or torn."""
    return records.read_mapping(experiment.state)


def find_git_commit() -> str:
    """Return the commit of the code, with `+` if files differ from it; empty if unknown."""

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return process.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return _find_bundle_commit()


def _find_bundle_commit() -> str:
    """Return the commit from which a bundle was packed, if the project was unpacked from one."""
    try:
        return json.loads((_ROOT / ".bundle.json").read_text())["summary"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@dataclass(frozen=True)
class Launch:
    """Describes the launch of all ranks. marks: its IDs. has_begun: whether this is a restart."""

    marks: list[str]
    has_begun: bool


def join_launch(experiment: Experiment, layout: ParallelLayout) -> Launch:
    """Return the launch of all ranks. All ranks must call this.

    A rank on a replacement machine cannot know by itself that this start is a restart.
    """
    from lib.parallel.layout import gather

    marks_here = launcher.launch_marks() + launcher.job_marks()
    recorded = _read_marks(experiment)
    ranks = gather((_is_of_this_launch(recorded), marks_here, recorded), layout.control)
    has_begun = any(is_of_launch for is_of_launch, _, _ in ranks)
    marks = {
        mark
        for _, marks_there, recorded_there in ranks
        for mark in marks_there + (recorded_there if has_begun else [])
    }
    return Launch(sorted(marks), has_begun)


def is_restart(experiment: Experiment) -> bool:
    """Return whether an earlier process of this launch has started the run."""
    return _is_of_this_launch(_read_marks(experiment))


def drop_one_time_options(config: Config, has_begun: bool) -> Config:
    """Return the options of a restart without --overwrite and --resume never, and log that.

    has_begun: whether this start is a restart; if not, the options stay as they are.
    """
    typed = (["--overwrite"] if config.overwrite else []) + (
        ["--resume never"] if config.resume == "never" else []
    )
    if not has_begun or not typed:
        return config
    log.info(f"{' and '.join(typed)} acted when this launch began: it resumes now")
    return replace(
        config, overwrite=False, resume="auto" if config.resume == "never" else config.resume
    )


def _is_of_this_launch(marks: list[str]) -> bool:
    """Return whether one of these marks belongs to the launch of this process."""
    marks_here = launcher.launch_marks() + (launcher.job_marks() if launcher.is_requeued() else [])
    return not set(marks_here).isdisjoint(marks)


def _read_marks(experiment: Experiment) -> list[str]:
    """Return the marks of the launch that wrote config.yaml; [] without such a file."""
    return run_records.read_config(experiment).get("launched_by") or []
