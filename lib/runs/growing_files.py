"""Follow the files of a run from any process, while the run appends to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.core import records
from lib.runs.run_records import parse_row


class GrowingFile:
    """Reads the complete lines of a file that grows.

    tail: begin with this number of bytes at the end of the file (default: the whole file).
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path = path
        self._tail = tail
        self._inode = -1
        self._offset = 0

    def read_new(self) -> tuple[list[bytes], bool]:
        """Return the new lines, and whether the file was replaced since the last call."""
        is_replaced = False
        try:
            with records.open_regular(self._path) as file:
                status = self._path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    is_replaced = True
                    self._offset = max(0, status.st_size - self._tail) if self._tail else 0
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            self._inode = -1
            self._offset = 0
            return [], True
        except OSError:  # the next read may succeed, such as after ESTALE on NFS
            return [], False
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines(), is_replaced


class JsonLines:
    """Follows a growing file of JSON lines. It ignores torn lines and values other than objects.

    tail: see GrowingFile.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._file = GrowingFile(path, tail)
        self.rows: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Read the new lines, or all lines if the file was replaced, and return all rows."""
        lines, is_replaced = self._file.read_new()
        if is_replaced:
            self.rows = []
        self.rows += [row for row in map(parse_row, lines) if row]
        return self.rows
