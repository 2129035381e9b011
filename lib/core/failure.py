"""How a rank tells torchrun, and the launcher above it, in which way it failed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from lib.core import log


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


def headline(text: str) -> str:
    """Return the line of an error or a traceback that says most."""
    lines = text.strip().splitlines() or [""]
    if lines[0].startswith("Traceback"):
        return lines[-1]
    if lines[0].endswith(" problems:") and len(lines) > 1:
        count = lines[0].removeprefix("error: ").removesuffix(":")
        return f"{lines[1].removeprefix('1. ')} (the first of {count})"
    return lines[0].removeprefix("error: ")
