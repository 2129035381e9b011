"""Define the events of a run's events.jsonl, for all code that writes or reads them."""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """An event of a run: its name, what has happened, and the fields that only this event has.

    Every line also has `time`, `event` and `step`. fields: meaning of each, by name.
    """

    meaning: str
    fields: dict[str, str]

    def __new__(cls, name: str, meaning: str, fields: dict[str, str] | None = None) -> Event:
        """Return a member whose value is the name alone."""
        event = str.__new__(cls, name)
        event._value_ = name
        event.meaning = meaning
        event.fields = fields or {}
        return event

    START = "start", "A run begins at step 0.", {"ranks": "number of ranks"}
    RESUME = (
        "resume",
        "A launch continues from a checkpoint, whose step this is.",
        {
            "path": "the checkpoint",
            "ranks": "number of ranks",
            "changes": "differences accepted by `--resume-with-changes`; absent without any",
        },
    )
    SAVE = (
        "save",
        "A checkpoint is complete.",
        {"path": "its name in `checkpoints/`, or its full path in the second tier"},
    )
    PRUNE = (
        "prune",
        "Checkpoints were deleted.",
        {
            "steps": "steps of the deleted checkpoints",
            "where": "the second tier; absent for the shared checkpoints",
            "reason": "absent if the retention rules are the reason",
        },
    )
    CLEAN = (
        "clean",
        "Leftovers of killed saves or interrupted deletions were deleted.",
        {
            "paths": "the deleted paths",
            "where": "the second tier; absent for the shared checkpoints",
        },
    )
    QUARANTINE = (
        "quarantine",
        "The checkpoint of this step is damaged. It was moved to `checkpoints/quarantine/`, or is "
        "ignored in the second tier.",
        {"reason": "what is damaged"},
    )
    SIGNAL = (
        "signal",
        "The launch stops after this step, which is saved.",
        {
            "signal": "`SIGTERM`, `SIGINT`, `SIGUSR1`, `--max-minutes`, `the stop file` or "
            "`the end of its launcher`"
        },
    )
    SKIP_STEP = (
        "skip_step",
        "Steps since the previous row left the weights unchanged.",
        {"steps": "number of skipped steps", "reason": "how many for which cause"},
    )
    ROLLBACK = (
        "rollback",
        "The run returned to the checkpoint of this step after too many bad steps in a row.",
        {
            "diverged_at": "the last of the bad steps",
            "bad_steps": "number of bad steps in a row",
        },
    )
    DISK_FULL = (
        "disk_full",
        "A save was skipped because the disk is full.",
        {"reason": "the error"},
    )
    LOCAL_SAVE_FAILED = (
        "local_save_failed",
        "A save to the second tier was skipped.",
        {"reason": "the error"},
    )
    FAILED = (
        "failed",
        "An error ended the launch. An error before the first step is only in the log.",
        {"reason": "first line of the error"},
    )
    COMPLETE = "complete", "The run has done all its steps, and the last one is saved."


# The events about which the monitor warns.
PROBLEMS = {
    Event.QUARANTINE,
    Event.SIGNAL,
    Event.SKIP_STEP,
    Event.ROLLBACK,
    Event.DISK_FULL,
    Event.LOCAL_SAVE_FAILED,
    Event.FAILED,
}
