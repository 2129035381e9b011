"""Store partially downloaded files so that they survive a kill at any moment."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.core import units
from lib.hub.repository import Digest, RemoteFile

PIECE_BYTES = 512 << 20  # large enough that the time of a request is negligible
_COUNT = struct.Struct("<Q")


class PartialFile:
    """Keeps a partially downloaded file, and beside it a file `….at` of byte counts per piece.

    Data is written before its count, so a kill never leaves a count that is too high. A power cut
    can; then the digest does not match.
    """

    def __init__(self, file: RemoteFile, directory: Path) -> None:
        self.file = file
        self.target = directory / file.path
        self._part = directory / file.part_name
        self._counts_path = _counts_path(self._part)
        self.pieces = max(1, units.ceil_div(file.size, PIECE_BYTES))
        self.failed_checks = 0  # number of complete downloads with a wrong digest
        self._lock = threading.Lock()
        self._is_claimed = False
        self._counts = [0] * self.pieces
        self._digest = Digest(file)

    def open(self) -> int:
        """Open the file, reuse the pieces of an earlier run, and return the bytes reused."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        counts = _read_counts(self._part)
        if (
            len(counts) == self.pieces
            and self._part.stat().st_size == self.file.size
            and all(count <= self.piece_size(i) for i, count in enumerate(counts))
        ):
            self._counts = counts
            return sum(counts)
        self._counts_path.write_bytes(bytes(_COUNT.size * self.pieces))
        with self._part.open("wb") as part:
            part.truncate(self.file.size)
        return 0

    def piece_size(self, piece: int) -> int:
        """Return the size of a piece in bytes."""
        return min(PIECE_BYTES, self.file.size - piece * PIECE_BYTES)

    def missing_range(self, piece: int) -> tuple[int, int]:
        """Return the offsets (start, end) of the bytes that a piece still lacks."""
        start = piece * PIECE_BYTES
        return start + self._counts[piece], start + self.piece_size(piece)

    @contextmanager
    def open_piece(self, piece: int) -> Iterator[Callable[[bytes], int]]:
        """Open a piece for writing.

        Yields a function that appends a chunk, up to the end of the piece, and returns the number
        of bytes written.
        """
        data, counts = (os.open(path, os.O_WRONLY) for path in (self._part, self._counts_path))

        def append(chunk: bytes) -> int:
            start, end = self.missing_range(piece)
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
        """Return whether all pieces are complete, and hash the complete pieces at the beginning."""
        if self._lock.acquire(blocking=False):  # else another thread hashes
            try:
                complete = 0
                while complete < self.pieces and self._counts[complete] == self.piece_size(
                    complete
                ):
                    complete += 1
                self._digest.update_to(self._part, min(complete * PIECE_BYTES, self.file.size))
            finally:
                self._lock.release()
        return sum(self._counts) == self.file.size

    def claim(self) -> bool:
        """Return True to one thread once the file is complete; that thread must finish it."""
        with self._lock:
            is_mine = not self._is_claimed and sum(self._counts) == self.file.size
            self._is_claimed = self._is_claimed or is_mine
        return is_mine

    def finish(self) -> str:
        """Check the digest and give the file its final name.

        Returns "" on success. Otherwise deletes the downloaded data and returns the difference.
        """
        with self._lock:
            self._digest.update_to(self._part, self.file.size)
            difference = self._digest.describe_mismatch()
            if difference:
                self._part.unlink()
                self._counts = [0] * self.pieces
                self._digest = Digest(self.file)
                self.failed_checks += 1
                self._is_claimed = False
            else:
                self._part.replace(self.target)
            self._counts_path.unlink()
        return difference


def count_fetched_bytes(file: RemoteFile, directory: Path) -> int:
    """Return the bytes of a file that are in a directory, whether it is complete or not."""
    target = directory / file.path
    return (
        target.stat().st_size if target.is_file() else sum(_read_counts(directory / file.part_name))
    )


def delete_partial(file: RemoteFile, directory: Path) -> None:
    """Delete the partial file and the counts of a file that is complete."""
    for path in (directory / file.part_name, _counts_path(directory / file.part_name)):
        path.unlink(missing_ok=True)


def list_possible_names(file: RemoteFile) -> set[str]:
    """Return the relative paths that belong to a file during and after its download."""
    return {file.path, file.part_name, str(_counts_path(Path(file.part_name)))}


def _counts_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.at")


def _read_counts(part: Path) -> list[int]:
    try:
        content = _counts_path(part).read_bytes()
    except OSError:
        return []
    usable = len(content) // _COUNT.size * _COUNT.size
    return [count for (count,) in _COUNT.iter_unpack(content[:usable])] if part.is_file() else []
