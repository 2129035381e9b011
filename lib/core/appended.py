"""A file that grows by pieces, each there whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

_MOST_WAITING = 16 << 20  # bytes


class AppendedFile:
    """Pieces go to the file at once; those that find no room wait in memory for the next one.

    Beyond 16 MiB the oldest that wait are dropped. is_text: pieces are lines, and what a crash left
    of a line keeps one to itself. Any thread may write.
    """

    def __init__(self, path: Path, is_text: bool = True) -> None:
        self._path = path
        self._is_text = is_text
        self._file: FileIO | None = None
        self._size = -1  # up to here the file holds whole pieces of ours, once it was opened
        self._torn = False  # whether the file ends within a line
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()

    def write(self, piece: bytes) -> None:
        """Append a piece after those that wait; OSError when it has to wait as well."""
        with self._lock:
            self._waiting.append(piece)
            while sum(map(len, self._waiting)) > _MOST_WAITING:
                self._waiting.popleft()
            self._append()

    def take_back(self) -> list[bytes]:
        """Return what waits, which waits no more."""
        with self._lock:
            pieces = list(self._waiting)
            self._waiting.clear()
            return pieces

    def close(self) -> None:
        """Write what waits, if that is possible now, and close; OSError when something is lost."""
        with self._lock:
            try:
                if self._waiting:
                    self._append()
            finally:
                self._let_go()

    def _append(self) -> None:
        file = self._file or self._open()
        data = b"".join(self._waiting)
        if self._torn:
            data = b"\n" + data
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with suppress(OSError):
                file.truncate(self._size)
            self._let_go()
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

    def _let_go(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None
