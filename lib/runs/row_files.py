"""Write and read rows of a run with all their values: metrics.jsonl, events.jsonl, samples.jsonl.

A row is a JSON object with a `step`, on one line. run_records.py reads rows for people instead, who
must not see values of the wrong type or control characters.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import log, manifest, records
from lib.core.append_only import AppendOnlyFile

try:
    from orjson import loads as _load_json
except ImportError:  # four times slower
    from json import loads as _load_json

_CHUNK = 1 << 20  # bytes of rows that are read at once

Row = dict[str, Any]


class RowFile:
    """Appends rows to a file, in the order of their steps, on one process.

    Rows that cannot be written wait in memory and are written with a later one; the log warns once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendOnlyFile(path)
        self._may_fail = log.WarnOnce(path.name)

    def write(self, row: Row) -> None:
        """Append a row."""
        with self._may_fail:
            self._file.write(_format_row(row))

    def rewind(self, step: int) -> list[Row] | None:
        """Drop the rows after a step; return the others in the file, None if that fails."""
        self.close()
        waiting = self._file.take_back()
        kept_rows = None
        with log.WarnOnce(f"{self._path.name} after step {step:,}", done="cut off"):
            kept_rows = _truncate(self._path, step)
        for line in waiting:
            if json.loads(line)["step"] <= step:
                with self._may_fail:
                    self._file.write(line)
        return kept_rows

    def close(self) -> None:
        """Write the waiting rows and close the file."""
        with self._may_fail:
            self._file.close()


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


def _truncate(path: Path, step: int) -> list[Row]:
    """Drop the rows after `step` from a file, and return the others.

    Rows are in the order of their steps, so the file can be truncated even if the disk is full.
    """
    rows = []
    kept_rows = []
    ends_at = 0
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        end += len(line)
        if row := parse_row(line):
            rows.append(row)
            if row["step"] <= step:
                kept_rows.append(row)
                ends_at = end
    if kept_rows != rows[: len(kept_rows)]:  # another program has changed the file
        manifest.write_text(path, "".join(_format_row(row).decode() for row in kept_rows))
    elif ends_at < end:
        with path.open("r+b") as file:
            file.truncate(ends_at)
            os.fsync(file.fileno())
    return kept_rows


def _format_row(row: Row) -> bytes:
    """Return a row as a line. NaN and infinity become null, because JSON lacks them."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(plain).encode() + b"\n"
