"""Gives the readers one input file: decompressed, sniffed, as a whole or line by line."""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lib.core.reading import ChunkStream, RetryingFile, decompress, skip_line
from lib.corpus import encoding, kinds
from lib.corpus.encoding import DecodedText

# A document (or file) larger than this is never in memory as a whole; one that has to be, because
# it is structured, is dropped. Several times its size is needed to turn it into a row.
LARGE_BYTES = 64_000_000
PACKED_SUFFIXES = {
    "gzip": (".gz", ".gzip"),
    "bzip2": (".bz2",),
    "xz": (".xz",),
    "zstd": (".zst", ".zstd"),
}
_BUFFER = 1 << 17
_CHUNK = 1 << 20
Stream = io.BufferedReader | io.BytesIO


class RawFile:
    """Reads an input file, or the part of it in [start, stop).

    kind: what it holds, once decompressed. head: its first bytes. start, stop: of JSON Lines the
    bytes in which lines begin, of Parquet row groups, of Arrow record batches. scratch: a directory
    for unpacked files. damage: why the compressed data ended too early, "" if it did not; known
    once all is read.
    """

    def __init__(
        self, path: str, start: int = 0, stop: int | None = None, scratch: str | None = None
    ) -> None:
        self.start = start
        self.stop = stop
        self.scratch = scratch
        self._path = path
        self.damage = ""
        self.stream: Stream = _open_file(path)
        self._file = self.stream
        self._sniff(path)
        if self.kind in PACKED_SUFFIXES:
            stem, suffix = posixpath.splitext(path)
            inner = stem if suffix.lower() in PACKED_SUFFIXES[self.kind] else path
            self.stream = _make_stream(
                decompress(self._file, self.kind, self._note_damage, _open_zstd)
            )
            self._sniff(inner)

    def _sniff(self, name: str) -> None:
        if isinstance(self.stream, io.BytesIO):
            self.head = self.stream.getbuffer()[: kinds.HEAD_BYTES].tobytes()
        else:
            self.head = self.stream.peek(kinds.HEAD_BYTES)[: kinds.HEAD_BYTES]
        self.kind = kinds.sniff_kind(name, self.head)

    def _note_damage(self, what: str) -> None:
        self.damage = what

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, limit: int = LARGE_BYTES) -> bytes | None:
        """Return the whole content, or None when it is larger than a limit: then use `decode`."""
        data = self.stream.read(limit + 1)
        if len(data) <= limit:
            return data
        self._prefix = io.BytesIO(data)
        return None

    def decode(self, fallback: str) -> DecodedText:
        """Return the text of large content, also of what `read` has read of it."""
        return DecodedText(_read_chunks(self._prefix, self.stream), self.head, fallback)

    @contextmanager
    def open_seekable(self) -> Iterator[BinaryIO]:
        """Open the content so that it can be read in any order; what is compressed is unpacked."""
        if self.stream is self._file:
            with io.BufferedReader(RetryingFile(self._path)) as file:
                yield file
            return
        with tempfile.TemporaryFile(dir=self.scratch) as file:
            shutil.copyfileobj(self.stream, file, _BUFFER)
            file.seek(0)
            yield file

    def read_lines(self) -> Iterator[tuple[int | None, bytes | None]]:
        """Yield (offset, line), as `read_blocks` gives them, one at a time."""
        for offset, lines in self.read_blocks():
            for line in [None] if lines is None else lines:
                yield offset, line
                offset = None if offset is None or line is None else offset + len(line)

    def read_blocks(self) -> Iterator[tuple[int | None, list[bytes] | None]]:
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
            lines = list(io.BytesIO(data))
            size = len(data)
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
                position += LARGE_BYTES + skip_line(stream)

    def _at_first_line(self) -> tuple[Stream, int]:
        """Return a stream of UTF-8 where the first line of this part starts, and its offset."""
        stream = self.stream
        position = 0
        if kinds.is_utf16(self.head):
            texts = DecodedText(_read_chunks(stream), self.head)
            stream = _make_stream(encoding.encode_text(text)[0] for text in texts)
        elif self.start:
            stream.seek(self.start - 1)
            room = None if self.stop is None else self.stop - self.start + 1
            position = self.start - 1 + skip_line(stream, room)
        elif self.head.startswith(kinds.UTF8_BOM):
            position = len(stream.read(len(kinds.UTF8_BOM)))
        return stream, position


def _open_file(path: str) -> Stream:
    """Open a file for reading; a small one is in memory at once, without a buffer of its own."""
    raw = RetryingFile(path)
    try:
        if os.fstat(raw.fileno()).st_size > _BUFFER:
            return io.BufferedReader(raw, _BUFFER)
        data = raw.readall()
    except BaseException:
        raw.close()
        raise
    raw.close()
    return io.BytesIO(data)


def _open_zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # which every dataset needs anyway

    return pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")


def _read_chunks(*streams: Any) -> Iterator[bytes]:
    """Yield the bytes of streams, one stream after the other."""
    for stream in streams:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _make_stream(chunks: Iterable[bytes]) -> io.BufferedReader:
    """Return chunks of bytes, none of them empty, as a stream."""
    return io.BufferedReader(ChunkStream(chunks), _BUFFER)
