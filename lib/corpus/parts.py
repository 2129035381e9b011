"""Rows as Arrow record batches.

An Arrow stream is the message of its schema, one message per record batch, and an end mark. A part
holds only batch messages, so parts laid one after the other between schema and end mark make a
stream: worker processes write parts, and shards.py puts them together in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 16_000_000
_ROW_OVERHEAD = 64  # bytes that a row takes in memory besides its text
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def schema(keep_source: bool) -> pa.Schema:
    """Return the columns of a dataset: `text`, and `source` if it is kept."""
    import pyarrow as pa
    columns = [("text", pa.large_string())] + [("source", pa.string())] * keep_source
    return pa.schema(columns)


class Part:
    """Writes rows as batch messages of about 16 MB (one row may be larger)."""

    def __init__(self, file: BinaryIO, keep_source: bool) -> None:
        self.rows = self.text_bytes = 0
        self._file, self._schema = file, schema(keep_source)
        self._texts: list[bytes] = []
        self._sources: list[str] | None = [] if keep_source else None
        self._size = 0

    def add(self, text: bytes, source: str) -> None:
        """Add a row. text: valid UTF-8."""
        if self._size + len(text) > BATCH_BYTES:
            self.flush()
        self._texts.append(text)
        if self._sources is not None:
            self._sources.append(source)
        self._size += len(text) + _ROW_OVERHEAD
        self.rows += 1
        self.text_bytes += len(text)

    def flush(self) -> None:
        """Write the rows collected so far as one batch."""
        import pyarrow as pa
        if not self._texts:
            return
        # Every text went through a codec, so it is valid UTF-8 and needs no second check.
        columns = [pa.array(self._texts, pa.large_binary()).view(pa.large_string())]
        if self._sources is not None:
            columns.append(pa.array(self._sources, pa.string()))
        batch = pa.record_batch(columns, schema=self._schema)
        self._file.write(batch.serialize())
        self._texts.clear()
        if self._sources is not None:
            self._sources.clear()
        self._size = 0
