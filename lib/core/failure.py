"""How a rank tells torchrun, and the launcher above it, in which way it failed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lib.core import log

_LAST_WORDS_S = 3.0


def record(kind: str, code: int, text: str) -> None:
    """Write the error file that torchrun names in TORCHELASTIC_ERROR_FILE; nothing without it.

    kind: the class of the error. code: the exit code to come. torchrun shows the call stack in its
    final report, which therefore is one line here: the text itself stands on the console. It takes
    the time (seconds) to tell which rank failed first.
    """
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    now = time.time()
    message = {"message": text, "errorCode": code, "kind": kind, "rank": log.rank(), "time": now,
               "extraInfo": {"timestamp": str(int(now)), "py_callstack": headline(text)}}
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
        threads = [threading.Thread(target=_tried, args=(tell,), daemon=True)
                   for tell in last_words]
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
    if lines[0].startswith("Traceback"):
        return lines[-1]
    if lines[0].endswith(" problems:") and len(lines) > 1:
        count = lines[0].removeprefix("error: ").removesuffix(":")
        return f"{lines[1].removeprefix('1. ')} (the first of {count})"
    return lines[0].removeprefix("error: ")
