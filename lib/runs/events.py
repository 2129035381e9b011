"""Define the events of a run's events.jsonl, and append them."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from lib.core import log
from lib.core.append_only import AppendOnlyFile
from lib.core.paths import Experiment
from lib.runs.run_records import format_time


class Event(str, Enum):
    """An event of a run. DESCRIPTIONS says what each one means and which fields it has."""

    START = "start"
    RESUME = "resume"
    SAVE = "save"
    PRUNE = "prune"
    CLEAN = "clean"
    QUARANTINE = "quarantine"
    SIGNAL = "signal"
    SKIP_STEP = "skip_step"
    ROLLBACK = "rollback"
    DISK_FULL = "disk_full"
    LOCAL_SAVE_FAILED = "local_save_failed"
    COPY = "copy"
    COPY_FAILED = "copy_failed"
    RESTORE = "restore"
    FAILED = "failed"
    COMPLETE = "complete"
    ON_END = "on_end"
    ON_END_FAILED = "on_end_failed"


class EventDescription(NamedTuple):
    """Describes an event, and the fields that only this event has.

    Every event also has `time`, `event` and `step`.
    """

    meaning: str
    fields: dict[str, str]


DESCRIPTIONS = {
    Event.START: EventDescription(
        "A run begins at step 0.",
        {"ranks": "number of ranks"},
    ),
    Event.RESUME: EventDescription(
        "A launch continues from the checkpoint of this step.",
        {
            "path": "the checkpoint",
            "ranks": "number of ranks",
            "changes": "differences accepted by `--resume-with-changes`; absent if there are none",
        },
    ),
    Event.SAVE: EventDescription(
        "A checkpoint is complete.",
        {"path": "its name in `checkpoints/`, or its full path in the second tier"},
    ),
    Event.PRUNE: EventDescription(
        "Checkpoints were deleted.",
        {
            "steps": "steps of the deleted checkpoints",
            "where": "the second tier, or the place of `--ckpt-copy-to`; absent for the shared "
            "checkpoints",
            "reason": "the cause; absent if it is the retention rules",
        },
    ),
    Event.CLEAN: EventDescription(
        "Leftovers of killed saves or interrupted deletions were deleted.",
        {
            "paths": "the deleted paths",
            "where": "the second tier, or the place of `--ckpt-copy-to`; absent for the shared "
            "checkpoints",
        },
    ),
    Event.QUARANTINE: EventDescription(
        "The checkpoint of this step is damaged. "
        "It was moved to `checkpoints/quarantine/`, or is ignored in the second tier.",
        {"reason": "what is damaged"},
    ),
    Event.SIGNAL: EventDescription(
        "The launch stops after this step, which is saved.",
        {
            "signal": "`SIGTERM`, `SIGINT`, `SIGUSR1`, "
            "`--max-minutes`, `the stop file` or `the end of its launcher`"
        },
    ),
    Event.SKIP_STEP: EventDescription(
        "Steps since the previous row left the weights unchanged.",
        {"steps": "number of skipped steps", "reason": "the number of steps for each cause"},
    ),
    Event.ROLLBACK: EventDescription(
        "The run returned to the checkpoint of this step after too many bad steps in a row.",
        {"diverged_at": "the last of the bad steps", "bad_steps": "number of bad steps in a row"},
    ),
    Event.DISK_FULL: EventDescription(
        "A save was skipped because the disk is full.", {"reason": "the error"}
    ),
    Event.LOCAL_SAVE_FAILED: EventDescription(
        "A save to the second tier was skipped.", {"reason": "the error"}
    ),
    Event.COPY: EventDescription(
        "The checkpoint of this step was copied with `--ckpt-copy-to`, and the copy was verified.",
        {"path": "the copy", "seconds": "how long that took"},
    ),
    Event.COPY_FAILED: EventDescription(
        "A checkpoint could not be copied; it is tried again. `step` is that of the newest copy.",
        {"reason": "the error"},
    ),
    Event.RESTORE: EventDescription(
        "The run had no complete checkpoint, and that of this step was restored from its copy.",
        {"path": "the copy"},
    ),
    Event.FAILED: EventDescription(
        "An error ended the launch. An error before the first step is only in the log.",
        {"reason": "first line of the error"},
    ),
    Event.COMPLETE: EventDescription(
        "The run has done all its steps, and the last one is saved.", {}
    ),
    Event.ON_END: EventDescription(
        "The command of `--on-end` has succeeded.",
        {"status": "`STATUS` of the command", "seconds": "how long it ran"},
    ),
    Event.ON_END_FAILED: EventDescription(
        "The command of `--on-end` has failed or was killed; `logs/on_end.log` contains its "
        "output.",
        {
            "status": "`STATUS` of the command",
            "seconds": "how long it ran",
            "reason": "its exit code, or why it has none",
        },
    ),
}

# The events about which the monitor warns.
PROBLEMS = {
    Event.QUARANTINE,
    Event.SIGNAL,
    Event.SKIP_STEP,
    Event.ROLLBACK,
    Event.DISK_FULL,
    Event.LOCAL_SAVE_FAILED,
    Event.COPY_FAILED,
    Event.RESTORE,
    Event.FAILED,
    Event.ON_END_FAILED,
}


class EventFile:
    """Appends lines to events.jsonl. If that fails, the log warns once, and the run goes on."""

    def __init__(self, experiment: Experiment) -> None:
        self._file = AppendOnlyFile(experiment.events)
        self._may_fail = log.WarnOnce(experiment.events.name)

    def add_event(self, event: Event, step: int, **facts: Any) -> None:
        """Append a line; if the disk is full, write it with a later line.

        facts: the fields of the event, see DESCRIPTIONS. Any thread may call
        this.
        """
        line = json.dumps({"time": format_time(), "event": event, "step": step, **facts}) + "\n"
        with self._may_fail:
            self._file.write(line.encode())
            self._file.close()  # makes the line visible on other machines at once
