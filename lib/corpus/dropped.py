"""Write dropped.jsonl, which lists every dropped row with the rule that drops it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lib.corpus.scan import escape_path

DROPPED_FILE = "dropped.jsonl"
_DIGITS = 4  # decimals of a value


def format_dropped(
    path: str, position: int | None, rule: str, value: Any, duplicate_of: dict[str, Any] | None
) -> bytes:
    """Return a line of dropped.jsonl.

    path: the file, relative to the data folder. position: number of the row in the file, from 1;
    None if an earlier version wrote the part without positions. value: the measurement of the rule.
    duplicate_of: the kept row that this row duplicates.
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


def format_place(row: Mapping[str, Any]) -> str:
    """Return the place of a row as text.

    row: its path and position, and the name of its dataset if that is an earlier one.
    """
    position = f", row {row['position']:,}" if row["position"] else ""
    place = escape_path(row["path"]) + position
    return f"{place} of {row['dataset']}" if "dataset" in row else place
