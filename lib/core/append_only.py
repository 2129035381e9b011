"""Append records to a file so that a failing disk leaves no partial record."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

_MOST_WAITING_BYTES = 16 << 20


class AppendOnlyFile:
    """Appends each record with one write. Any thread may append.

    Records that cannot be written wait in memory and are written before the next one. If more than
    16 MiB wait, the oldest are dropped, but never the newest. is_text: each record is a line; if a
    crash left an incomplete line, the next record begins on a new one.
    """

    def __init__(self, path: Path, is_text: bool = True) -> None:
        self._path = path
        self._is_text = is_text
        self._file: FileIO | None = None
        self._size = -1  # bytes of complete records, once the file is open
        self._torn = False  # whether the file ends within a line
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()

    def write(self, record: bytes) -> None:
        """Append a record after those that wait. Raises OSError if it has to wait as well."""
        with self._lock:
            self._waiting.append(record)
            while len(self._waiting) > 1 and sum(map(len, self._waiting)) > _MOST_WAITING_BYTES:
                self._waiting.popleft()
            self._append()

    def take_back(self) -> list[bytes]:
        """Remove and return the records that are not written yet."""
        with self._lock:
            records = list(self._waiting)
            self._waiting.clear()
            return records

    def close(self) -> None:
        """Write the records that wait and close the file. Raises OSError if any are lost."""
        with self._lock:
            try:
                if self._waiting:
                    self._append()
            finally:
                self._close_file()

    def _append(self) -> None:
        file = self._file or self._open()
        data = (b"\n" if self._torn else b"") + b"".join(self._waiting)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with suppress(OSError):
                file.truncate(self._size)
            self._close_file()
            raise
        self._size = self._size + len(data)
        self._torn = False
        self._waiting.clear()

    def _open(self) -> FileIO:
        """Open the file at its end, and cut off a partial record of an earlier failed write."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab+", buffering=0)
        try:
            size = file.seek(0, os.SEEK_END)
            if 0 <= self._size < size:
                file.truncate(self._size)
                size = self._size
            if self._is_text and size:
                file.seek(size - 1)
                self._torn = file.read(1) != b"\n"
        except OSError:
            file.close()
            raise
        self._file = file
        self._size = size
        return file

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None
