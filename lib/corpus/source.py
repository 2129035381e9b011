"""One input file as the readers see it: decompressed, sniffed, as a whole or line by line."""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import BinaryIO

from lib.core.reading import PatientFile
from lib.corpus import encoding, inflate, kinds

# A document (or file) larger than this is never in memory as a whole; one that has to be, because
# it is structured, is dropped. Several times its size is needed to turn it into a row.
LARGE_BYTES = 64_000_000
_BUFFER = 1 << 17


class Source:
    """An open input file, or the part of it in [start, stop).

    kind: what it holds, once decompressed. head: its first bytes. start, stop: of JSON Lines the
    bytes in which lines begin, of Parquet row groups, of Arrow record batches. scratch: a directory
    for unpacked files.
    """

    def __init__(self, path: str, start: int = 0, stop: int | None = None,
                 scratch: str | None = None) -> None:
        self.start, self.stop = start, stop
        self.scratch, self._path = scratch, path
        self._inflated: inflate.Inflated | None = None
        self.stream: BinaryIO = _opened(path)
        self._sniff(path)
        if self.kind in inflate.SUFFIXES:
            stem, suffix = posixpath.splitext(path)
            inner = stem if suffix.lower() in inflate.SUFFIXES[self.kind] else path
            self._inflated = inflate.Inflated(self.stream, self.kind)
            self.stream = io.BufferedReader(self._inflated, _BUFFER)
            self._sniff(inner)

    def _sniff(self, name: str) -> None:
        if isinstance(self.stream, io.BytesIO):
            self.head = self.stream.getbuffer()[:kinds.HEAD_BYTES].tobytes()
        else:
            self.head = self.stream.peek(kinds.HEAD_BYTES)[:kinds.HEAD_BYTES]
        self.kind = kinds.sniff(name, self.head)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stream.close()

    @property
    def damage(self) -> str:
        """Why the compressed data ended too early, "" if it did not; known once all is read."""
        return self._inflated.damage if self._inflated else ""

    def read(self, limit: int = LARGE_BYTES) -> bytes | None:
        """Return the whole content, or None when it is larger than a limit: then use `pieces`."""
        data = self.stream.read(limit + 1)
        if len(data) <= limit:
            return data
        self._prefix = data
        return None

    def pieces(self, fallback: str) -> encoding.Pieces:
        """Return the text of large content, also of what `read` has read of it."""
        joined = io.BufferedReader(_Joined(self._prefix, self.stream), _BUFFER)
        self._prefix = b""
        return encoding.Pieces(joined, self.head, fallback)

    @contextmanager
    def seekable(self) -> Iterator[BinaryIO]:
        """Open the content so that it can be read in any order; what is compressed is unpacked."""
        if not self._inflated:
            with io.BufferedReader(PatientFile(self._path)) as file:
                yield file
            return
        with tempfile.TemporaryFile(dir=self.scratch) as file:
            shutil.copyfileobj(self.stream, file, _BUFFER)
            file.seek(0)
            yield file

    def lines(self) -> Iterator[tuple[int | None, bytes | None]]:
        """Yield (offset, line), as `blocks` gives them, one at a time."""
        for offset, lines in self.blocks():
            if lines is None:
                yield offset, None
                continue
            for line in lines:
                yield offset, line
                offset = None if offset is None else offset + len(line)

    def blocks(self) -> Iterator[tuple[int | None, list[bytes] | None]]:
        """Yield (offset, lines) of UTF-8 without BOM, split at `\\n` bytes only and keeping them.

        A line of more than LARGE_BYTES is alone and None. UTF-16 is turned into UTF-8 first, and
        has no offsets. Of a part: the lines that start in it.
        """
        stream, position = self._at_first_line()
        has_offsets = stream is self.stream
        while self.stop is None or position < self.stop:
            room = min(_BUFFER, LARGE_BYTES)
            data = stream.read(room if self.stop is None else min(room, self.stop - position))
            if not data:
                return
            lines, size = list(io.BytesIO(data)), len(data)
            if not lines[-1].endswith(b"\n"):
                rest = stream.readline(LARGE_BYTES - len(lines[-1]))
                lines[-1] += rest
                size += len(rest)
            is_long = len(lines[-1]) == LARGE_BYTES and not lines[-1].endswith(b"\n")
            if is_long:
                size -= len(lines.pop())
            if lines:
                yield position if has_offsets else None, lines
            position += size
            if is_long:
                yield position if has_offsets else None, None
                position += LARGE_BYTES + _rest_of_line(stream)

    def _at_first_line(self) -> tuple[BinaryIO, int]:
        """Return a stream of UTF-8 where the first line of this part starts, and its offset."""
        stream, position = self.stream, 0
        if kinds.is_utf16(self.head):
            stream = io.BufferedReader(encoding.Utf8(encoding.Pieces(stream, self.head)), _BUFFER)
        elif self.start:
            stream.seek(self.start - 1)
            room = None if self.stop is None else self.stop - self.start + 1
            position = self.start - 1 + _rest_of_line(stream, room)
        elif self.head.startswith(encoding.UTF8_BOM):
            position = len(stream.read(len(encoding.UTF8_BOM)))
        return stream, position


def _opened(path: str) -> BinaryIO:
    """Open a file for reading; a small one is in memory at once, without a buffer of its own."""
    raw = PatientFile(path)
    try:
        if os.fstat(raw.fileno()).st_size > _BUFFER:
            return io.BufferedReader(raw, _BUFFER)
        data = raw.readall()
    except BaseException:
        raw.close()
        raise
    raw.close()
    return io.BytesIO(data)


def _rest_of_line(stream: BinaryIO, limit: int | None = None) -> int:
    """Skip to the start of the next line, or past a limit; return how many bytes that were."""
    size = 0
    while (limit is None or size < limit) and (part := stream.readline(_BUFFER)):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


class _Joined(io.RawIOBase):
    """Some bytes and then a stream."""

    def __init__(self, first: bytes, then: BinaryIO) -> None:
        super().__init__()
        self._first, self._then = io.BytesIO(first), then

    def readable(self) -> bool:
        """Tell io.BufferedReader that this can be read."""
        return True

    def readinto(self, target: memoryview) -> int:
        """Fill as much of a buffer as there is; 0 at the end."""
        return self._first.readinto(target) or self._then.readinto(target)
