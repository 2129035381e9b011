"""Open an input file for the readers: decompressed, with its kind, at once or line by line."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lib.core import reading
from lib.core.reading import ChunkStream, RetryingFile, skip_line
from lib.corpus import encoding, kinds
from lib.corpus.encoding import DecodedText

# A document or file larger than this is never held in memory at once. A structured document that
# is larger is dropped, because parsing it takes several times its size.
LARGE_BYTES = 64_000_000
_BUFFER = 1 << 17
_CHUNK = 1 << 20
Stream = io.BufferedReader | io.BytesIO


class RawFile:
    """Reads an input file, or the span [start, stop) of it.

    kind: format of the decompressed content. document: `html`, `pdf`, `docx` or `epub`, "" for
    other files. head: the first bytes of the decompressed content. start, stop: byte offsets in
    JSON Lines (the span contains the lines that begin in it), or indices of row groups in Parquet
    or record batches in Arrow. scratch: directory for decompressed files. damage: why the
    compressed data ended early, "" if it is intact; set while the content is read.
    """

    def __init__(
        self, path: str, start: int = 0, stop: int | None = None, scratch: str | None = None
    ) -> None:
        self.start = start
        self.stop = stop
        self.scratch = scratch
        self._path = path
        self.damage = ""
        self._lines_text: DecodedText | None = None  # the content of lines in UTF-16
        self.stream: Stream = _open_file(path)
        self._file = self.stream
        self._sniff(path)
        if self.kind in reading.COMPRESSIONS.values():
            self.stream = _make_stream(
                reading.decompress_file(
                    self._file, self.kind, self._note_damage, _open_frames, scratch
                )
            )
            self._sniff(reading.strip_compression(path))

    def _sniff(self, name: str) -> None:
        if isinstance(self.stream, io.BytesIO):
            self.head = self.stream.getbuffer()[: kinds.HEAD_BYTES].tobytes()
        else:
            self.head = self.stream.peek(kinds.HEAD_BYTES)[: kinds.HEAD_BYTES]
        self.name = name
        self.kind = kinds.sniff_kind(name, self.head)
        if self.kind not in reading.COMPRESSIONS.values():
            self._add_mark(kinds.mark_utf16(self.head)[: -len(self.head) or None])
        self.document = ""
        if self.kind == "text" or self.kind in kinds.DOCUMENTS:
            self.document = kinds.sniff_document(name, self.head)

    def _add_mark(self, mark: bytes) -> None:
        """Put a byte order mark before the content."""
        if not mark:
            return
        self.head = mark + self.head
        if isinstance(self.stream, io.BytesIO):
            self.stream = io.BytesIO(mark + self.stream.getvalue())
        else:
            self.stream = _make_stream(_read_chunks(io.BytesIO(mark), self.stream))

    def _note_damage(self, reason: str) -> None:
        self.damage = reason

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def is_plain_text(self) -> bool:
        """Return whether the content is the file itself, and no UTF-16."""
        return self.stream is self._file and not kinds.is_utf16(self.head)

    @property
    def replaced(self) -> int:
        """Return the number of replacements in the lines so far."""
        return self._lines_text.replaced if self._lines_text else 0

    def read(self, limit: int = LARGE_BYTES) -> bytes | None:
        """Return the content, or None if it is larger than the limit; then use `decode`.

        A character that damage cuts is left out; it would make all of the content look like text
        in another encoding.
        """
        data = self.stream.read(limit + 1)
        if len(data) <= limit:
            is_cut = self.damage and not kinds.is_utf16(self.head)
            return encoding.drop_cut_character(data) if is_cut else data
        self._prefix = io.BytesIO(data)
        return None

    def decode(self, fallback: str) -> DecodedText:
        """Return the text of large content, including the bytes that `read` has consumed.

        As for small content, all of it is decoded with a fallback of several bytes per character
        if it is not UTF-8. So such content is read twice.
        """
        is_fallback = (
            encoding.needs_whole_text(fallback)
            and not kinds.is_utf16(self.head)
            and not self._is_utf8()
        )
        chunks = _read_chunks(self._prefix, self.stream)
        return DecodedText(chunks, self.head, fallback, is_fallback)

    def _is_utf8(self) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with RawFile(self._path) as again:
            try:
                for data in _read_chunks(again.stream):
                    decoder.decode(data)
                decoder.decode(b"", not again.damage)
            except UnicodeDecodeError:
                return False
        return True

    @contextmanager
    def open_seekable(self) -> Iterator[BinaryIO]:
        """Open the content for random access; compressed content is unpacked to a file."""
        if self.stream is self._file:
            with io.BufferedReader(RetryingFile(self._path)) as file:
                yield file
            return
        with tempfile.TemporaryFile(dir=self.scratch) as file:
            shutil.copyfileobj(self.stream, file, _BUFFER)
            file.seek(0)
            yield file

    def read_lines(self, ends_with_cr: bool = False) -> Iterator[tuple[int | None, bytes | None]]:
        """Yield (offset, line) for each line of `read_blocks`."""
        for offset, lines in self.read_blocks(ends_with_cr):
            for line in [None] if lines is None else lines:
                yield offset, line
                offset = None if offset is None or line is None else offset + len(line)

    def read_blocks(
        self, ends_with_cr: bool = False
    ) -> Iterator[tuple[int | None, list[bytes] | None]]:
        """Yield (offset, lines) as UTF-8 without a BOM, split after each `\\n` byte.

        For a line of more than LARGE_BYTES, `lines` is None. UTF-16 is converted to UTF-8 and has
        no offsets. A span consists of the lines that start in it. ends_with_cr: read each `\\r` as
        `\\n`.
        """
        stream, position = self._at_first_line()
        if ends_with_cr:
            chunks = _read_chunks(stream)
            stream = _make_stream(chunk.replace(b"\r", b"\n") for chunk in chunks)
        has_offsets = not kinds.is_utf16(self.head)
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
        """Return a UTF-8 stream positioned at the first line of this span, and its offset."""
        stream = self.stream
        position = 0
        if kinds.is_utf16(self.head):
            self._lines_text = DecodedText(_read_chunks(stream), self.head)
            stream = _make_stream(encoding.encode_text(text)[0] for text in self._lines_text)
        elif self.start:
            stream.seek(self.start - 1)
            room = None if self.stop is None else self.stop - self.start + 1
            position = self.start - 1 + skip_line(stream, room)
        elif self.head.startswith(kinds.UTF8_BOM):
            position = len(stream.read(len(kinds.UTF8_BOM)))
        return stream, position


def _open_file(path: str) -> Stream:
    """Open a file for reading; a small file is read into memory at once, which is faster."""
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


def _open_frames(file: BinaryIO, kind: str) -> Any:
    import pyarrow as pa  # needed for every dataset anyway

    return pa.CompressedInputStream(pa.PythonFile(file, "r"), kind)


def _read_chunks(*streams: Any) -> Iterator[bytes]:
    """Yield the bytes of streams, one stream after the other."""
    for stream in streams:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _make_stream(chunks: Iterable[bytes]) -> io.BufferedReader:
    """Return chunks of bytes as a stream; no chunk may be empty."""
    return io.BufferedReader(ChunkStream(chunks), _BUFFER)
