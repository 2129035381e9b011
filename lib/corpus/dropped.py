"""Write dropped.jsonl, which lists every dropped row with the rule that drops it."""

from __future__ import annotations

import json
from typing import Any

DROPPED_FILE = "dropped.jsonl"
_DIGITS = 4  # of a value


def format_dropped(
    path: str, position: int, rule: str, value: Any, duplicate_of: dict[str, Any] | None
) -> bytes:
    """Return a line of dropped.jsonl.

    path: of the file, in the data folder. position: number of the row in the file, from 1. value:
    what the rule has measured. duplicate_of: the kept row that this one duplicates.
    """
    value = round(float(value), _DIGITS) if isinstance(value, float) else value
    line = {
        "path": path,
        "position": position,
        "rule": rule,
        "value": value,
        "duplicate_of": duplicate_of,
    }
    return json.dumps(line).encode() + b"\n"
