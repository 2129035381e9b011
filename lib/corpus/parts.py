"""Write rows as Arrow record batches.

An Arrow stream consists of a schema message, one message per record batch, and an end-of-stream
marker. A part contains only batch messages. Worker processes write parts, and shards.py makes a
stream of them: a schema message, the parts in order, and the marker.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

BATCH_BYTES = 16_000_000
_ROW_OVERHEAD = 64  # estimated memory of a row in bytes, without its text
_CHUNK = 1 << 20
NO_SIDECARS: Mapping[str, BinaryIO] = MappingProxyType({})
NO_VALUES: Mapping[str, bytes] = MappingProxyType({})
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def make_text_schema(keep_source: bool) -> pa.Schema:
    """Return the schema of a text dataset: `text`, and `source` if it is kept."""
    import pyarrow as pa

    columns = [("text", pa.large_string())] + ([("source", pa.string())] if keep_source else [])
    return pa.schema(columns)


class Part(ABC):
    """Write rows as batch messages of about 16 MB (a single row may be larger).

    sidecars: by name, the file that receives one value per row (see selection.py). text_bytes:
    bytes of text written.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, sidecars: Mapping[str, BinaryIO]) -> None:
        self._written = 0
        self.text_bytes = 0
        self._file = file
        self._schema = schema
        self._sidecars = sidecars

    @property
    @abstractmethod
    def rows(self) -> int:
        """Return the number of rows, including the rows not written yet."""

    @abstractmethod
    def flush(self) -> None:
        """Write the rows collected so far as one batch."""

    def _write_sidecars(self, values: Mapping[str, bytes]) -> None:
        for name, file in self._sidecars.items():
            file.write(values[name])

    def finish(self) -> None:
        """Write the remaining rows, and truncate the old content of a reused file."""
        self.flush()
        self._file.truncate()


class PartWriter(Part):
    """Write the rows of a text dataset."""

    def __init__(
        self, file: BinaryIO, keep_source: bool, sidecars: Mapping[str, BinaryIO] = NO_SIDECARS
    ) -> None:
        super().__init__(file, make_text_schema(keep_source), sidecars)
        self._texts: list[bytes] = []
        self._sources: list[str] | None = [] if keep_source else None
        self._size = 0

    @property
    def rows(self) -> int:
        """Return the number of rows, including the rows not written yet."""
        return self._written + len(self._texts)

    def add(self, text: bytes, source: str, values: Mapping[str, bytes] = NO_VALUES) -> None:
        """Add a row. text: valid UTF-8. values: the value of the row for each sidecar, by name."""
        if self._size + len(text) > BATCH_BYTES and self._texts:
            self.flush()
        self._texts.append(text)
        self._size += len(text) + _ROW_OVERHEAD
        if self._sources is not None:
            self._sources.append(source)
        self._write_sidecars(values)

    def extend(self, texts: Sequence[bytes], source: str) -> None:
        """Add several rows without sidecars; the batches are the same as with `add`."""
        size = sum(map(len, texts)) + _ROW_OVERHEAD * len(texts)
        if self._size + size > BATCH_BYTES:  # one of the rows may have to start a batch
            for text in texts:
                self.add(text, source)
            return
        self._texts += texts
        self._size += size
        if self._sources is not None:
            self._sources += [source] * len(texts)

    def add_file(
        self, text: BinaryIO, size: int, source: str, values: Mapping[str, bytes] = NO_VALUES
    ) -> None:
        """Add a row too large for memory.

        text: file of valid UTF-8. size: its size in bytes. values: the value of the row for each
        sidecar, by name.
        """
        import mmap

        import pyarrow as pa

        self.flush()
        offsets = pa.array([0, size], pa.int64()).buffers()[1]
        with mmap.mmap(text.fileno(), size, access=mmap.ACCESS_READ) as never_touched:
            columns = [
                pa.Array.from_buffers(
                    pa.large_string(), 1, [None, offsets, pa.py_buffer(never_touched)]
                )
            ]
            if self._sources is not None:
                columns.append(pa.array([source], pa.string()))
            batch = pa.record_batch(columns, schema=self._schema)
            sink = _Splice(self._file, text, size)
            # NOTE: the writer passes large buffers on unchanged, so no page of the map is read.
            writer = pa.ipc.new_stream(pa.PythonFile(sink, "w"), self._schema)
            sink.skip = len(self._schema.serialize())
            writer.write_batch(batch)
            sink.skip = 1 << 62  # skips the end-of-stream marker
            writer.close()
            del writer, batch, columns
        self._written += 1
        self.text_bytes += size
        self._write_sidecars(values)

    def flush(self) -> None:
        """Write the rows collected so far as one batch."""
        import pyarrow as pa

        if not (rows := len(self._texts)):
            return
        self._written += rows
        self.text_bytes += sum(map(len, self._texts))
        columns = [join_texts(self._texts)]
        if self._sources is not None:
            columns.append(pa.array(self._sources, pa.string()))
        batch = pa.record_batch(columns, schema=self._schema)
        self._file.write(batch.serialize())
        self._texts.clear()
        if self._sources is not None:
            self._sources.clear()
        self._size = 0


def join_texts(texts: Sequence[bytes]) -> pa.Array:
    """Return texts as an Arrow array, without validating them: a codec has produced each text."""
    import numpy as np
    import pyarrow as pa

    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.large_string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    )


class _Splice(io.RawIOBase):
    """Write an Arrow stream, but replace its one huge buffer by the content of a file.

    skip: number of bytes of the stream to omit before writing continues.
    """

    def __init__(self, target: BinaryIO, text: BinaryIO, size: int) -> None:
        super().__init__()
        self._target = target
        self._text = text
        self._size = size
        self.skip = 0

    def writable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def write(self, data: Any) -> int:
        """Write a buffer; a buffer with the size of the file is replaced by the file's content."""
        size = len(data)
        if self.skip:
            self.skip -= size
        elif size == self._size:
            self._text.seek(0)
            while chunk := self._text.read(_CHUNK):
                self._target.write(chunk)
        else:
            self._target.write(memoryview(data))
        return size


def rewrite_part(
    part: Path, schema: pa.Schema, keep: np.ndarray | None, lines_before: int
) -> Iterator[tuple[bytes, int]]:
    """Yield the batch messages with the selected rows of a part, and the bytes of text in each.

    keep: which rows to keep (bool [rows], None: all). lines_before: added to the column `line`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    row = 0
    with pa.OSFile(str(part)) as file:
        while file.tell() < file.size():
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
            is_kept = None if keep is None else keep[row : row + batch.num_rows]
            row += batch.num_rows
            if is_kept is not None and not is_kept.all():
                batch = batch.filter(pa.array(is_kept))
            if not batch.num_rows:
                continue
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
