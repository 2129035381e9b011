"""Read sizes, beginnings and sources of rows, without decoding their texts."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from lib.tokens import columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_BYTES_OF_CHARACTER = 4


def list_text_bytes(rows: pa.RecordBatch) -> np.ndarray:
    """Return the bytes of each text (int64 [rows]); of a conversation, of the contents of turns."""
    import numpy as np

    sizes = _count_bytes(_list_contents(rows))
    if "text" in rows.schema.names:
        return sizes
    total = np.concatenate([[0], np.cumsum(sizes)])
    edges = np.array(columns.find_conversation_edges(rows))
    return total[edges[1:]] - total[edges[:-1]]


def _list_contents(rows: pa.RecordBatch) -> pa.Array:
    import pyarrow as pa

    if "text" in rows.schema.names:
        return rows.column("text").cast(pa.large_string())  # it may be a dictionary of strings
    return columns.read_field(columns.flatten_messages(rows), "content")


def _count_bytes(texts: pa.Array) -> np.ndarray:
    import numpy as np
    import pyarrow.compute as pc

    sizes = pc.fill_null(pc.binary_length(texts), 0)
    return sizes.to_numpy(zero_copy_only=False).astype(np.int64)


def read_beginning(rows: pa.RecordBatch, row: int, characters: int) -> str:
    """Return the first characters of a row; the contents of turns are joined by newlines."""
    if "text" in rows.schema.names:
        return _decode_beginning(_list_contents(rows.slice(row, 1))[0], characters)
    contents = _list_contents(rows)
    (start, end), *_ = [*pairwise(columns.find_conversation_edges(rows))][row : row + 1]
    text = ""
    for turn in range(start, end):
        text += ("\n" if text else "") + _decode_beginning(contents[turn], characters)
        if len(text) > characters:
            break
    return text[:characters]


def _decode_beginning(text: pa.Scalar, characters: int) -> str:
    if not text.is_valid:
        return ""
    data = memoryview(text.as_buffer())[: _BYTES_OF_CHARACTER * characters]
    # The cut may be inside of a character.
    return bytes(data).decode("utf-8", "ignore")[:characters]


def list_sources(batch: pa.RecordBatch) -> list[str]:
    """Return the values of the column `source`, "" for each row without one."""
    number = batch.schema.get_field_index("source")
    if number < 0 or not columns.is_string(str(batch.schema.field(number).type)):
        return ["" for _ in range(batch.num_rows)]
    return [source or "" for source in columns.list_values(batch.column(number))]
