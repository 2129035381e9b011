"""A file to which whole pieces are appended: a failing disk leaves no part of a piece."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

_MOST_WAITING = 16 << 20  # bytes


class AppendOnlyFile:
    """Writes each piece at once. Pieces that cannot be written wait in memory for the next one.

    If more than 16 MiB wait, the oldest are dropped. is_text: pieces are lines, and a line that a
    crash has torn stays on a line of its own. Any thread may write.
    """

    def __init__(self, path: Path, is_text: bool = True) -> None:
        self._path = path
        self._is_text = is_text
        self._file: FileIO | None = None
        self._size = -1  # up to here the file contains whole pieces of ours, once it is open
        self._torn = False  # whether the file ends within a line
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()

    def write(self, piece: bytes) -> None:
        """Append a piece after those that wait. Raises OSError if it has to wait as well."""
        with self._lock:
            self._waiting.append(piece)
            while sum(map(len, self._waiting)) > _MOST_WAITING:
                self._waiting.popleft()
            self._append()

    def take_back(self) -> list[bytes]:
        """Return the pieces that wait, and forget them."""
        with self._lock:
            pieces = list(self._waiting)
            self._waiting.clear()
            return pieces

    def close(self) -> None:
        """Write the pieces that wait and close the file. Raises OSError if any are lost."""
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
        """Open the file at its end, without the partial piece that a failed write of ours left."""
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
