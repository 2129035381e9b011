"""Read rows of a run with all their values: metrics.jsonl, events.jsonl, samples.jsonl.

A row is a JSON object with a `step`, on one line. run_records.py reads rows for people instead, who
must not see values of the wrong type or control characters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import records

try:
    from orjson import loads as _load_json
except ImportError:  # four times slower
    from json import loads as _load_json

_CHUNK = 1 << 20  # bytes of rows that are read at once

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """Parse a line, a mapping with a `step`. null becomes NaN.

    Returns None for a torn line, or one without such a mapping.
    """
    try:
        row = records.parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {key: math.nan if value is None else value for key, value in row.items()}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, without lines that a crash has torn.

    The result is empty if the file is missing or cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [row for row in map(parse_row, lines) if row]


def read_tail(path: Path, size: int) -> list[Row]:
    """Return the rows in the last `size` bytes of a file, like `read_rows`."""
    try:
        with records.open_regular(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            if start:
                file.readline()  # a part of a row
            lines = file.read().splitlines()
    except OSError:
        return []
    return [row for row in map(parse_row, lines) if row]


def read_chunks(path: Path) -> Iterator[list[Row]]:
    """Yield the rows of a long file in lists, like `read_rows`; a null may stay None."""
    with suppress(OSError), records.open_regular(path) as file:
        while lines := file.readlines(_CHUNK):
            if rows := _parse_lines(lines):
                yield rows


def _parse_lines(lines: Sequence[bytes]) -> list[Row]:
    try:
        rows = list(map(_load_json, lines))
        if all(map(_has_step, rows)):
            return rows
    except ValueError:  # a torn line, or NaN, which is no JSON
        pass
    return [row for row in map(parse_row, lines) if row]


def _has_step(row: Any) -> bool:
    return type(row) is dict and type(row.get("step")) is int
