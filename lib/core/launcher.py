"""Find out what started this process (torchrun, a launcher) and report failures to it."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lib.core import liveness, log

_LAST_WORDS_S = 3.0
_TRACEBACK = "Traceback"
KILLED = "Killed"  # the kind of failure of a rank that a signal has ended
MARK = "LAUNCH_MARK"  # environment variable with the same value in all processes of a launch


def is_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def parent_pid() -> int:
    """Return the parent of this process at the time of the first call."""
    return os.getppid()


def is_gone() -> bool:
    """Return whether the torchrun that started this process has ended; False without torchrun."""
    return is_torchrun() and os.getppid() != parent_pid()


def launch_marks() -> list[str]:
    """Return texts that identify this launch; [] for a process that a person started."""
    marks = [os.environ[MARK]] if os.environ.get(MARK) else []
    return marks + ([liveness.process_identity(parent_pid())] if is_torchrun() else [])


def job_marks() -> list[str]:
    """Return the name of the current Slurm job as a list, empty outside of a job.

    It does not identify a launch: a person may start several launches by hand in one job.
    """
    job = os.environ.get("SLURM_JOB_ID")
    return [f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')} {job}"] if job else []


def is_requeued() -> bool:
    """Return whether Slurm has restarted the job."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def record_failure(kind: str, code: int, text: str, rank: int | None = None) -> None:
    """Write the error file that torchrun names in TORCHELASTIC_ERROR_FILE, if it names one.

    kind: the class name of the error, or KILLED. code: the exit code of this process. rank: the
    rank that failed, if it is not this process. torchrun ends with a long report that contains the
    call stack from this file. So the call stack contains an error of rank 0 in full, but only one
    line of a traceback or of another rank's error. torchrun compares the timestamps (in seconds) to
    find the rank that failed first.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    now = time.time()
    is_short = log.rank() > 0 or text.startswith(_TRACEBACK)
    message = {
        "message": text,
        "errorCode": code,
        "kind": kind,
        "rank": log.rank() if rank is None else rank,
        "time": now,
        "extraInfo": {
            "timestamp": str(int(now)),
            "py_callstack": headline(text) if is_short else text,
        },
    }
    with suppress(OSError):  # the failure itself matters more than its report
        temporary = Path(f"{path}.tmp")
        temporary.write_text(json.dumps({"message": message}), encoding="utf-8")
        temporary.replace(path)


def end_at_once(code: int, *last_words: Callable[[], object]) -> NoReturn:
    """End the process within seconds, even if disks or pipes hang.

    last_words: functions to call before that, each in its own thread. A function that fails, or
    hangs on a disk or an unread pipe, delays neither the others nor the end.
    """
    try:
        threads = [
            threading.Thread(target=_call_safely, args=(report,), daemon=True)
            for report in last_words
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _LAST_WORDS_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        os._exit(code)


def _call_safely(report: Callable[[], object]) -> None:
    with suppress(Exception):
        report()


def headline(text: str) -> str:
    """Return the most informative line of an error or a traceback."""
    lines = text.strip().splitlines() or [""]
    if lines[0].startswith(_TRACEBACK):
        return lines[-1]
    if lines[0].endswith(" problems:") and len(lines) > 1:
        count = lines[0].removeprefix("error: ").removesuffix(":")
        return f"{lines[1].removeprefix('1. ')} (the first of {count})"
    return lines[0].removeprefix("error: ")
