"""Find intact checkpoints in quarantine; older versions moved them there after read errors."""

from __future__ import annotations

from pathlib import Path

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands, paths, records
from lib.core.events import Event
from lib.core.paths import Experiment

_READ_ERROR = "[Errno "  # start of the reason in events.jsonl if a disk failed to read


def list_unreadable(checkpoints: Path) -> list[Checkpoint]:
    """Return quarantined checkpoints that a disk failed to read, newest first.

    They may be intact.
    """
    events = Experiment(checkpoints.parent.parent, checkpoints.parent.name).events
    steps = {
        event["step"]
        for event in records.read_log_rows(events)
        if event.get("event") == Event.QUARANTINE
        and str(event.get("reason")).startswith(_READ_ERROR)
    }
    candidates = [
        (paths.step_of(path.name.partition("-")[0]), path)
        for path in commit.list_quarantined(checkpoints)
    ]
    return sorted(
        (Checkpoint(path, step) for step, path in candidates if step is not None and step in steps),
        key=lambda c: c.step,
        reverse=True,
    )


def restore_command(checkpoint: Checkpoint) -> str:
    """Return the command that restores a checkpoint from quarantine."""
    return commands.shell(
        "mv", checkpoint.path, checkpoint.path.parent.parent / paths.step_name(checkpoint.step)
    )
