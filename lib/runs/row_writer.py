"""Write the rows of metrics.jsonl and samples.jsonl."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from lib.core import log, manifest
from lib.core.append_only import AppendOnlyFile
from lib.runs.row_files import Row, parse_row


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
    if len(kept_rows) < len(rows):
        log.info(
            f"{path.name} had rows up to step {rows[-1]['step']:,}; those after step {step:,} are "
            "dropped, since these steps are repeated"
        )
    return kept_rows


def _format_row(row: Row) -> bytes:
    """Return a row as a line. NaN and infinity become null, because JSON lacks them."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(plain).encode() + b"\n"
