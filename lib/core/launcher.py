"""What started this process: torchrun, the marks of a launch, and how both hear of a failure."""

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

from lib.core import lease, log

_LAST_WORDS_S = 3.0
_TRACEBACK = "Traceback"
MARK = "LAUNCH_MARK"  # variable that launchers set, the same for all that they start


def is_torchrun() -> bool:
    """Tell whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def process() -> int:
    """Return the process that had started this one when this was first asked."""
    return os.getppid()


def is_gone() -> bool:
    """Tell whether the torchrun that started this process has ended; False without one."""
    return is_torchrun() and os.getppid() != process()


def marks() -> list[str]:
    """Return what no other launch has; nothing for a process that a person started."""
    given = [os.environ[MARK]] if os.environ.get(MARK) else []
    return given + ([lease.identity(process())] if is_torchrun() else [])


def job_marks() -> list[str]:
    """Return the mark of a job of Slurm, in which a person may start several launches by hand."""
    job = os.environ.get("SLURM_JOB_ID")
    return [f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')} {job}"] if job else []


def is_requeued() -> bool:
    """Tell whether Slurm has started the job again, and with it what it started before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def record_failure(kind: str, code: int, text: str) -> None:
    """Write the error file that torchrun names in TORCHELASTIC_ERROR_FILE; nothing without it.

    kind: the class of the error. code: the exit code to come. torchrun prints the call stack in the
    report that it ends with: an error of rank 0 stands there in full, because the report buries it
    otherwise, and of other ranks and of a traceback one line. It takes the time (seconds) to tell
    which rank failed first.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    now = time.time()
    is_short = log.rank() > 0 or text.startswith(_TRACEBACK)
    message = {
        "message": text,
        "errorCode": code,
        "kind": kind,
        "rank": log.rank(),
        "time": now,
        "extraInfo": {
            "timestamp": str(int(now)),
            "py_callstack": headline(text) if is_short else text,
        },
    }
    with suppress(OSError):  # what failed matters more than telling it
        temporary = Path(f"{path}.tmp")
        temporary.write_text(json.dumps({"message": message}), encoding="utf-8")
        temporary.replace(path)


def end_at_once(code: int, *last_words: Callable[[], object]) -> NoReturn:
    """End the process within seconds, whatever disks and pipes do.

    last_words: what is told before. Each has a thread of its own: one that fails, or hangs in a
    disk or a pipe that nobody reads, costs neither the others nor the end.
    """
    try:
        threads = [
            threading.Thread(target=_tried, args=(tell,), daemon=True) for tell in last_words
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _LAST_WORDS_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        os._exit(code)


def _tried(tell: Callable[[], object]) -> None:
    with suppress(Exception):
        tell()


def headline(text: str) -> str:
    """Return the line of an error or a traceback that says most."""
    lines = text.strip().splitlines() or [""]
    if lines[0].startswith(_TRACEBACK):
        return lines[-1]
    if lines[0].endswith(" problems:") and len(lines) > 1:
        count = lines[0].removeprefix("error: ").removesuffix(":")
        return f"{lines[1].removeprefix('1. ')} (the first of {count})"
    return lines[0].removeprefix("error: ")
