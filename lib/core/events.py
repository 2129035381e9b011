"""The names of events in a run's events.jsonl, for all that write or read them."""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """An event of a run; docs/reference/artifacts.md lists when each is written, and its fields."""

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
    FAILED = "failed"
    COMPLETE = "complete"


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
