"""Write rows as Arrow record batches.

An Arrow stream consists of a schema message, one message per record batch, and an end-of-stream
marker. A part contains only batch messages. Worker processes write parts, and shards.py makes a
stream of them: a schema message, the parts in order, and the marker.
"""

from __future__ import annotations

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.corpus.arrow_arrays import join_texts, make_column, pack_flags

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

BATCH_BYTES = 16_000_000
_ROW_OVERHEAD = 64  # estimated memory of a row in bytes, without its text
_CHUNK = 1 << 20
LARGE_PART = 128_000_000  # bytes; a part or row of this size is not read into memory
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def make_text_schema(keep_source: bool) -> pa.Schema:
    """Return the schema of a text dataset: `text`, and `source` if it is kept."""
    import pyarrow as pa

    columns = [("text", pa.large_string())] + ([("source", pa.string())] if keep_source else [])
    return pa.schema(columns)


class Part(ABC):
    """Writes rows as batch messages of about 16 MB (a single row may be larger).

    text_bytes: bytes of text written.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._written = 0
        self.text_bytes = 0
        self._file = file
        self._schema = schema

    @property
    @abstractmethod
    def rows(self) -> int:
        """Return the number of rows, including the rows not written yet."""

    @abstractmethod
    def flush(self) -> None:
        """Write the rows collected so far as one batch."""

    def finish(self) -> None:
        """Write the remaining rows, and truncate the old content of a reused file."""
        self.flush()
        self._file.truncate()


class PartWriter(Part):
    """Writes the rows of a text dataset."""

    def __init__(self, file: BinaryIO, keep_source: bool) -> None:
        super().__init__(file, make_text_schema(keep_source))
        self._texts: list[bytes] = []
        self._sources: list[str] | None = [] if keep_source else None
        self._size = 0

    @property
    def rows(self) -> int:
        """Return the number of rows, including the rows not written yet."""
        return self._written + len(self._texts)

    def add(self, text: bytes, source: str) -> None:
        """Add a row. text: valid UTF-8."""
        if self._size + len(text) > BATCH_BYTES and self._texts:
            self.flush()
        self._texts.append(text)
        self._size += len(text) + _ROW_OVERHEAD
        if self._sources is not None:
            self._sources.append(source)

    def extend(self, texts: Sequence[bytes], source: str) -> None:
        """Add several rows; the batches are the same as with `add`."""
        size = sum(map(len, texts)) + _ROW_OVERHEAD * len(texts)
        if self._size + size > BATCH_BYTES:  # one of the rows may start a new batch
            for text in texts:
                self.add(text, source)
            return
        self._texts += texts
        self._size += size
        if self._sources is not None:
            self._sources += [source] * len(texts)

    def add_file(self, text: BinaryIO, size: int, source: str) -> None:
        """Add a row too large for memory.

        text: file of valid UTF-8. size: its size in bytes.
        """
        import pyarrow as pa

        self.flush()
        others = [] if self._sources is None else [make_column([source], pa.string())]
        for piece in format_large_row(text, size, others, self._schema):
            self._file.write(piece)
        self._written += 1
        self.text_bytes += size

    def flush(self) -> None:
        """Write the rows collected so far as one batch."""
        import pyarrow as pa

        if not (rows := len(self._texts)):
            return
        self._written += rows
        self.text_bytes += sum(map(len, self._texts))
        columns = [join_texts(self._texts)]
        if self._sources is not None:
            columns.append(make_column(self._sources, pa.string()))
        batch = pa.record_batch(columns, schema=self._schema)
        self._file.write(batch.serialize())
        self._texts.clear()
        if self._sources is not None:
            self._sources.clear()
        self._size = 0


def format_large_row(
    text: BinaryIO, size: int, others: Sequence[pa.Array], schema: pa.Schema
) -> Iterator[bytes]:
    """Yield the batch message of one row with a text larger than memory, in pieces.

    text: file of valid UTF-8. size: its size in bytes. others: the columns after the text.
    """
    import mmap

    import numpy as np
    import pyarrow as pa

    offsets = pa.py_buffer(np.array([0, size]))
    with mmap.mmap(text.fileno(), size, access=mmap.ACCESS_READ) as never_touched:
        buffers = [None, offsets, pa.py_buffer(never_touched)]
        batch = pa.record_batch(
            [pa.Array.from_buffers(pa.large_string(), 1, buffers), *others], schema=schema
        )
        pieces = _split_message(batch, size)
        del batch, buffers
    for piece in pieces:
        yield from _read_chunks(text, 0, size) if piece is None else (piece,)


def _split_message(batch: pa.RecordBatch, size: int) -> list[bytes | None]:
    """Return the pieces of a batch message, with None for its one buffer of `size` bytes.

    The content of that buffer is not read, so it may be larger than memory.
    """
    import pyarrow as pa

    pieces = _Pieces(size)
    # NOTE: the writer passes large buffers on unchanged, so no page of a mapped file is read.
    writer = pa.ipc.new_stream(pa.PythonFile(pieces, "w"), batch.schema)
    pieces.skip = len(batch.schema.serialize())
    writer.write_batch(batch)
    pieces.skip = 1 << 62  # skips the end-of-stream marker
    writer.close()
    return pieces.list


class _Pieces(io.RawIOBase):
    """Collects an Arrow stream, with None in place of its one huge buffer.

    skip: number of bytes of the stream to omit before collecting continues.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.list: list[bytes | None] = []
        self.skip = 0

    def writable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def write(self, data: Any) -> int:
        """Collect a buffer; a buffer of the huge size is replaced by None."""
        size = len(data)
        if self.skip:
            self.skip -= size
        else:
            self.list.append(None if size == self._size else bytes(data))
        return size


def _read_chunks(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """Yield a range of a file in chunks."""
    file.seek(start)
    while size and (chunk := file.read(min(size, _CHUNK))):
        size -= len(chunk)
        yield chunk


class MessageFile(io.RawIOBase):
    """Lets pyarrow write a stream into a file, without its schema message and its end.

    A large buffer is passed on without a copy. file: the part.

    >>> with MessageFile.open(part, schema) as writer:
    ...     writer.write_batch(batch)
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        super().__init__()
        self._file = file
        self._skip = len(schema.serialize())

    @classmethod
    @contextmanager
    def open(cls, path: Path, schema: pa.Schema) -> Iterator[Any]:
        """Yield a writer for the batches of a part."""
        import pyarrow as pa

        with path.open("wb") as file:
            messages = cls(file, schema)
            writer = pa.ipc.new_stream(pa.PythonFile(messages, "w"), schema)
            yield writer
            messages._skip = sys.maxsize  # the end of the stream
            writer.close()

    def writable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def write(self, data: Any) -> int:
        """Write a piece of the stream, unless it is to be skipped."""
        size = len(data)
        if self._skip:
            self._skip -= size
        else:
            self._file.write(data)
        return size


def rewrite_part(
    part: Path, schema: pa.Schema, is_kept: np.ndarray | None, lines_before: int
) -> Iterator[tuple[bytes, int]]:
    """Yield the batch messages with the kept rows of a part, and the bytes of text in each.

    is_kept: bool [rows]; None keeps all. lines_before: number to add to the column `line`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    row = 0
    # A mapped file is read page by page as needed, but a disk error then kills the process.
    open_file = pa.memory_map if part.stat().st_size > LARGE_PART else pa.OSFile
    with open_file(str(part)) as file:
        while file.tell() < file.size():
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
            own_flags = None if is_kept is None else is_kept[row : row + batch.num_rows]
            row += batch.num_rows
            if own_flags is not None and not own_flags.any():
                continue
            if is_large_text(batch):
                yield from _copy_large_row(part, file, batch)
                continue
            if own_flags is not None and not own_flags.all():
                batch = batch.filter(pack_flags(own_flags))
            if lines_before:
                number = schema.get_field_index("line")
                batch = batch.set_column(
                    number, schema.field(number), pc.add(batch.column(number), lines_before)
                )
            text = (
                batch["text"]
                if "text" in schema.names
                else batch["messages"].flatten().field("content")
            )
            yield batch.serialize(), pc.sum(pc.binary_length(text)).as_py()


def is_large_text(batch: pa.RecordBatch) -> bool:
    """Return whether a batch is one text that is larger than memory, and not a conversation."""
    is_text = "text" in batch.schema.names  # a conversation was in memory when it was read
    return is_text and batch.num_rows == 1 and batch.nbytes > LARGE_PART


def _copy_large_row(
    part: Path, file: pa.MemoryMappedFile, batch: pa.RecordBatch
) -> Iterator[tuple[bytes, int]]:
    """Yield the message of a batch with one large text, in pieces of which only one is in memory.

    file: the mapped part that the batch was read from.
    """
    text = batch["text"].buffers()[2]
    position = file.tell()
    file.seek(0)
    start = text.address - file.read_buffer(1).address
    file.seek(position)
    with part.open("rb") as source:
        for piece in _split_message(batch, text.size):
            if piece is not None:
                yield piece, 0
                continue
            for chunk in _read_chunks(source, start, text.size):
                yield chunk, len(chunk)
