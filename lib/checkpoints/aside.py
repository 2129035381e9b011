"""Whole checkpoints in quarantine: set aside by older versions when a disk failed to read them."""

from __future__ import annotations

from pathlib import Path

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import commands, paths, records
from lib.core.paths import Experiment

_OF_A_DISK = "[Errno "  # begins the reason in events.jsonl, where others say what is damaged


def unread(checkpoints: Path) -> list[Checkpoint]:
    """Return those in quarantine that a disk failed to read, newest first; they may be whole."""
    events = Experiment(checkpoints.parent.parent, checkpoints.parent.name).events
    steps = {
        event["step"]
        for event in records.read_log_rows(events)
        if event.get("event") == "quarantine" and str(event.get("reason")).startswith(_OF_A_DISK)
    }
    found = [
        (paths.step_of(path.name.partition("-")[0]), path)
        for path in commit.quarantined(checkpoints)
    ]
    return sorted(
        (Checkpoint(path, step) for step, path in found if step is not None and step in steps),
        key=lambda c: c.step,
        reverse=True,
    )


def brought_back(checkpoint: Checkpoint) -> str:
    """Return the command that takes a checkpoint out of quarantine."""
    return commands.shell(
        "mv", checkpoint.path, checkpoint.path.parent.parent / paths.step_name(checkpoint.step)
    )
