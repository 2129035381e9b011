"""Keeps what arrives of files, several pieces at a time, through a kill at any moment."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.core import units
from lib.hub.repository import Digest, RemoteFile

PIECE_BYTES = 512 << 20  # so large that asking for one takes no time beside fetching it
_COUNT = struct.Struct("<Q")


class PartialFile:
    """Keeps an unfinished file and, beside it in `….at`, the number of bytes of each piece.

    The bytes are written first and counted then, so after a kill the count is never too high;
    after a power cut it may be, which the digest shows.
    """

    def __init__(self, file: RemoteFile, directory: Path) -> None:
        self.file = file
        self.target = directory / file.path
        self._part = directory / file.part
        self._counts_path = _counts_path(self._part)
        self.pieces = max(1, units.ceil_div(file.size, PIECE_BYTES))
        self.refused = 0  # how often the whole turned out to differ from what was declared
        self._lock = threading.Lock()
        self._is_claimed = False
        self._counts = [0] * self.pieces
        self._digest = Digest(file)

    def open(self) -> int:
        """Take up what an earlier run left; return the bytes that are there."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        there = _read_counts(self._part)
        if (
            len(there) == self.pieces
            and self._part.stat().st_size == self.file.size
            and all(count <= self.piece_size(i) for i, count in enumerate(there))
        ):
            self._counts = there
            return sum(there)
        self._counts_path.write_bytes(bytes(_COUNT.size * self.pieces))
        with self._part.open("wb") as part:
            part.truncate(self.file.size)
        return 0

    def piece_size(self, piece: int) -> int:
        """Return the size of a piece."""
        return min(PIECE_BYTES, self.file.size - piece * PIECE_BYTES)

    def range_left(self, piece: int) -> tuple[int, int]:
        """Return the first and the end offset of what a piece still lacks."""
        start = piece * PIECE_BYTES
        return start + self._counts[piece], start + self.piece_size(piece)

    @contextmanager
    def appending(self, piece: int) -> Iterator[Callable[[bytes], int]]:
        """Open a piece; yields what appends as much of a chunk as belongs to it, and counts it."""
        data, counts = (os.open(path, os.O_WRONLY) for path in (self._part, self._counts_path))

        def append(chunk: bytes) -> int:
            start, end = self.range_left(piece)
            view = memoryview(chunk)[: end - start]
            written = 0
            while written < len(view):
                written += os.pwrite(data, view[written:], start + written)
            self._counts[piece] += written
            os.pwrite(counts, _COUNT.pack(self._counts[piece]), piece * _COUNT.size)
            return written

        try:
            yield append
        finally:
            os.close(data)
            os.close(counts)

    def is_complete(self) -> bool:
        """Tell whether all pieces are whole, and check along the way what is there in one row."""
        if self._lock.acquire(blocking=False):  # else another thread is at it, or will be
            try:
                whole = 0
                while whole < self.pieces and self._counts[whole] == self.piece_size(whole):
                    whole += 1
                self._digest.read(self._part, min(whole * PIECE_BYTES, self.file.size))
            finally:
                self._lock.release()
        return sum(self._counts) == self.file.size

    def claim(self) -> bool:
        """Return True to the first who asks of a complete file, and is to finish it."""
        with self._lock:
            is_mine = not self._is_claimed and sum(self._counts) == self.file.size
            self._is_claimed = self._is_claimed or is_mine
        return is_mine

    def finish(self) -> str:
        """Give the file its name if it is what was declared; else say in words how it differs."""
        with self._lock:
            self._digest.read(self._part, self.file.size)
            difference = self._digest.compare()
            if difference:
                self._part.unlink()
                self._counts = [0] * self.pieces
                self._digest = Digest(self.file)
                self.refused = self.refused + 1
                self._is_claimed = False
            else:
                self._part.replace(self.target)
            self._counts_path.unlink()
        return difference


def count_bytes(file: RemoteFile, directory: Path) -> int:
    """Return how many bytes of a file are in a directory, whole or unfinished."""
    target = directory / file.path
    return target.stat().st_size if target.is_file() else sum(_read_counts(directory / file.part))


def forget(file: RemoteFile, directory: Path) -> None:
    """Delete what is left of the pieces of a file that is whole."""
    for path in (directory / file.part, _counts_path(directory / file.part)):
        path.unlink(missing_ok=True)


def list_names(file: RemoteFile) -> set[str]:
    """Return the relative paths that a file may be found under while it arrives."""
    return {file.path, file.part, str(_counts_path(Path(file.part)))}


def _counts_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.at")


def _read_counts(part: Path) -> list[int]:
    try:
        content = _counts_path(part).read_bytes()
    except OSError:
        return []
    usable = len(content) // _COUNT.size * _COUNT.size
    return [count for (count,) in _COUNT.iter_unpack(content[:usable])] if part.is_file() else []
