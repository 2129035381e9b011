"""What a run tells about itself: config.yaml, state.json and events.jsonl, by rank 0."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

import yaml

from lib.checkpoints import commit
from lib.core import commands, log, manifest, records
from lib.core.append_only import AppendOnlyFile
from lib.core.errors import StageError
from lib.core.events import Event
from lib.core.paths import Experiment

_ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(r"[0-9a-f]+")


class Journal:
    """Writes nothing on other ranks than 0."""

    def __init__(self, experiment: Experiment, rank: int) -> None:
        self.experiment = experiment
        self._active = rank == 0
        self._events = AppendOnlyFile(experiment.events)
        self._lock = Lock()
        self._is_over = False
        self._event_may_fail = log.Tolerated(experiment.events.name)
        self._state_may_fail = log.Tolerated(experiment.state.name, OSError, StageError)

    def config(
        self,
        resolved: dict[str, Any],
        settled: dict[str, Any],
        identity: dict[str, Any],
        model_dir: Path,
        launch: str,
        run: str,
        launched_by: list[str],
    ) -> None:
        """Write config.yaml: resolved options, versions, argv and the commit of the code.

        settled: what was chosen where the options leave it open.
        launch, run: marks of this start, and of the run that all its starts go on with.
        launched_by: those of what started it; see launches.py.
        """
        if not self._active:
            return
        content = {
            "launch": launch,
            "run": run,
            "launched_by": launched_by,
            "options": resolved,
            "settled": settled,
            "model_dir": str(model_dir),
            "identity": identity,
            "versions": manifest.package_versions(),
            "argv": commands.redacted_argv(sys.argv),
            "git_commit": git_commit(),
        }
        manifest.write_text(self.experiment.config, yaml.safe_dump(content, sort_keys=False))

    def state(self, status: str, **facts: Any) -> None:
        """Replace state.json: a hint for people and launchers, never the truth.

        After another status than `running` that one is written no more: a save in the background
        may end later than the run. Any thread may call this.
        """
        if not self._active:
            return
        with self._lock, self._state_may_fail:
            self._is_over |= status != "running"
            if status == "running" and self._is_over:
                return
            checkpoints = [c.step for c in commit.list_checkpoints(self.experiment.checkpoints)]
            content = {
                "status": status,
                **facts,
                "checkpoints": checkpoints,
                "updated": now(),
            }
            try:
                manifest.write_json(self.experiment.state, content)
            except OSError:
                # A full disk has room where the last one stands; the error told is the first.
                if not _is_overwritten(self.experiment.state, json.dumps(content).encode()):
                    raise

    def event(self, event: Event, step: int, **facts: Any) -> None:
        """Append a line to events.jsonl, as soon as the disk has room; any thread may call this."""
        if self._active:
            line = json.dumps({"time": now(), "event": event, "step": step, **facts}) + "\n"
            with self._event_may_fail:
                self._events.write(line.encode())
                self._events.close()  # who looks from another machine sees it at once


def _is_overwritten(path: Path, content: bytes) -> bool:
    """Put other content into a file that is there; tell whether that was possible."""
    try:
        with path.open("r+b", buffering=0) as file:
            done = file.write(content)
            file.truncate(done)
    except OSError:
        return False
    return done == len(content)


def read_state(experiment: Experiment) -> dict[str, Any]:
    """Return state.json, or an empty dict when it is missing or torn."""
    return records.read_mapping(experiment.state)


def read_config(experiment: Experiment) -> dict[str, Any]:
    """Return config.yaml, or an empty dict when it is missing or torn."""
    try:
        content = records.read_yaml(experiment.config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and _is_sound(content) else {}


def _is_sound(content: dict[str, Any]) -> bool:
    """Tell whether what a config.yaml holds has the form in which it is written."""
    identity = content.get("identity", {})
    parts = [content.get("options", {}), content.get("settled", {}), identity]
    if isinstance(identity, dict):
        parts += [identity.get("options", {}), identity.get("inputs", {})]
    marks = [content.get(key, "0") for key in ("run", "launch")]  # parts of names of directories
    return (
        all(isinstance(part, dict) for part in parts)
        and isinstance(content.get("model_dir", ""), str)
        and isinstance(content.get("launched_by", []), list)
        and all(isinstance(mark, str) and _MARK.fullmatch(mark) for mark in marks)
    )


def git_commit() -> str:
    """Return the commit of the code, `+` behind it when files differ from it; empty if unknown."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return _unpacked_commit()


def _unpacked_commit() -> str:
    """Return the commit that a bundle was packed from, in a project that was unpacked from one."""
    try:
        return json.loads((_ROOT / ".bundle.json").read_text())["summary"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def now(seconds: float | None = None) -> str:
    """Return a time as events.jsonl and metrics.jsonl contain it, in UTC.

    seconds: since the epoch; None for the present.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
