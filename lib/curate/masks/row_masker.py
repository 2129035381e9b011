"""Mask the rows of a record batch; a batch without a match is returned as it is.

Texts larger than memory are masked in pieces that end at a newline, with the same result.
"""

from __future__ import annotations

import json
import mmap
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core.conversation import CALLS, TEMPLATE_KWARGS, parse_arguments
from lib.corpus import json_data, parts
from lib.corpus.arrow_arrays import join_texts, pack_flags
from lib.curate.masks.masker import Masker
from lib.curate.masks.matches import MaskedMatches
from lib.tokens import columns

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_BYTES = 16_000_000  # bytes of a large text, or of rows, that are masked at once
_LONGEST_LINE = 64_000_000  # bytes; a longer line of a large text is cut after a space
# An escape in JSON, which would look like a letter beside a match.
_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|.)")
_TEXT_FIELDS = ("content", "reasoning_content", "name")  # masked fields of a turn


def mask_rows(
    rows: pa.RecordBatch, masker: Masker, scratch: Path | None
) -> tuple[pa.RecordBatch, MaskedMatches]:
    """Return rows with their matches replaced, and the matches by row.

    scratch: directory for texts larger than memory (None: the default one for temporary files).
    """
    if "text" not in rows.schema.names:
        return _mask_conversations(rows, masker)
    texts = rows.column("text")
    if texts.nbytes > parts.LARGE_PART:
        masked, hits = _mask_large_column(texts, masker, scratch)
    else:
        masked, hits = _mask_column(texts, masker)
    return _set_column(rows, "text", masked), hits


def _set_column(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    number = rows.schema.get_field_index(name)
    return rows.set_column(number, rows.schema.field(number), column)


def _mask_conversations(
    rows: pa.RecordBatch, masker: Masker
) -> tuple[pa.RecordBatch, MaskedMatches]:
    """Return conversations with the matches in their turns, calls, tools and variables replaced."""
    import numpy as np
    import pyarrow as pa

    hits = MaskedMatches()
    kind = rows.schema.field("messages").type
    turns = columns.flatten_messages(rows)
    edges = np.array(columns.find_conversation_edges(rows), np.int64)
    row_of_turn = np.repeat(np.arange(rows.num_rows), np.diff(edges)).tolist()
    fields = []
    for field in kind.value_type:
        column = columns.read_field(turns, field.name)
        if field.name in (*_TEXT_FIELDS, CALLS):
            mask_column = _mask_json_column if field.name == CALLS else _mask_column
            column, matches = mask_column(column, masker)
            hits.extend(matches.move(row_of_turn), 0)
        fields.append(column)
    if hits.rows:
        turns = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
        buffers = [None, pa.py_buffer(edges)]
        messages = pa.Array.from_buffers(kind, rows.num_rows, buffers, children=[turns])
        rows = _set_column(rows, "messages", messages)
    for name in (name for name in ("tools", TEMPLATE_KWARGS) if name in rows.schema.names):
        column, matches = _mask_json_column(rows.column(name), masker)
        rows = _set_column(rows, name, column)
        hits.extend(matches, 0)
    return rows, hits


def _mask_column(column: pa.Array, masker: Masker) -> tuple[pa.Array, MaskedMatches]:
    """Return a column of texts with the matches replaced."""
    import pyarrow as pa

    texts, hits = masker.mask_texts(column.cast(pa.large_binary()).to_pylist())
    return (_make_texts(texts) if hits.rows else column), hits


def _make_texts(texts: list[bytes | None]) -> pa.Array:
    import pyarrow as pa

    if None in texts:
        return pa.array(texts, pa.large_binary()).view(pa.large_string())
    return join_texts([text or b"" for text in texts])


def _mask_json_column(column: pa.Array, masker: Masker) -> tuple[pa.Array, MaskedMatches]:
    """Return a column of JSON with the matches in its values replaced; it stays valid JSON."""
    import pyarrow as pa

    texts: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    hits = MaskedMatches()
    for number, text in enumerate(texts):
        if text is not None and masker.may_match(_ESCAPE.sub(b" ", text)):
            matches = MaskedMatches()
            value = _mask_value(json_data.load_json(text.decode()), masker, matches)
            if matches.rows:
                texts[number] = json_data.dump_json(value)
                hits.extend(matches, number)
    return (_make_texts(texts) if hits.rows else column), hits


def _mask_value(value: Any, masker: Masker, hits: MaskedMatches) -> Any:
    """Return a value of JSON with the matches replaced in strings, keys and long numbers.

    The names and identifiers of functions stay, because other turns refer to them.
    """
    if isinstance(value, list):
        return [_mask_value(item, masker, hits) for item in value]
    if isinstance(value, dict):
        keys = _separate_keys({key: _mask_value(key, masker, hits) for key in value})
        return {
            keys[key]: _mask_item(key, item, value, masker, hits) for key, item in value.items()
        }
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, str) and not is_number:
        return value
    (masked,), matches = masker.mask_texts([str(value).encode()])
    if not matches.rows or masked is None:
        return value
    hits.extend(matches, 0)
    return masked.decode()


def _mask_item(
    key: str, item: Any, holder: dict[str, Any], masker: Masker, hits: MaskedMatches
) -> Any:
    """Return an item of an object with its matches replaced; JSON text stays valid JSON."""
    if _is_name(key, item, holder):
        return item
    arguments = parse_arguments(item) if key == "arguments" and isinstance(item, str) else None
    if not arguments:
        return _mask_value(item, masker, hits)
    matches = MaskedMatches()
    masked = _mask_value(arguments, masker, matches)
    if not matches.rows:
        return item
    hits.extend(matches, 0)
    return json.dumps(masked, ensure_ascii=False)


def _separate_keys(keys: dict[str, str]) -> dict[str, str]:
    """Map the keys of an object to their masked forms; add a number where two became equal.

    Otherwise one of their values would be lost. A key without a match stays as it is.
    """
    used = {key for key, masked in keys.items() if key == masked}
    separate = {}
    for key, masked in keys.items():
        name = masked
        number = 1
        while name in used and key != masked:
            number += 1
            name = f"{masked} ({number})"
        used.add(name)
        separate[key] = name
    return separate


def _is_name(key: str, item: Any, holder: dict[str, Any]) -> bool:
    """Return whether an item of a call or tool is its identifier or the name of its function."""
    is_call = key == "id" and "function" in holder
    is_function = key == "name" and ("arguments" in holder or "parameters" in holder)
    return isinstance(item, str) and (is_call or is_function)


def _mask_large_column(
    column: pa.Array, masker: Masker, scratch: Path | None
) -> tuple[pa.Array, MaskedMatches]:
    """Return a column of texts larger than memory with the matches replaced.

    The new column is a mapped file in `scratch`, which vanishes together with the column.
    """
    import numpy as np
    import pyarrow as pa

    hits = MaskedMatches()
    sizes = np.zeros(len(column) + 1, np.int64)
    with tempfile.TemporaryFile(dir=scratch) as file:
        for first, texts in _read_pieces(column):
            masked, matches = masker.mask_texts(texts)
            hits.extend(matches, first)
            for number, text in enumerate(masked, first + 1):
                sizes[number] += len(text or b"")
                file.write(text or b"")
        if not hits.rows:
            return column, hits
        file.flush()
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    is_valid = column.is_valid().to_numpy(zero_copy_only=False)
    validity = pack_flags(is_valid).buffers()[1] if column.null_count else None
    buffers = [validity, pa.py_buffer(np.cumsum(sizes)), pa.py_buffer(data)]
    return pa.Array.from_buffers(column.type, len(column), buffers), hits


def _read_pieces(column: pa.Array) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield the texts of consecutive rows, or a piece of one text, with the row of the first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = pc.fill_null(pc.binary_length(column), 0).to_pylist()
    first = 0
    while first < len(sizes):
        stop = first + 1
        total = sizes[first]
        while stop < len(sizes) and total + sizes[stop] <= _PIECE_BYTES:
            total += sizes[stop]
            stop += 1
        if total <= _PIECE_BYTES:
            yield first, column.slice(first, stop - first).cast(pa.large_binary()).to_pylist()
        else:
            text = memoryview(column[first].as_buffer())
            for start, end in _cut_text(text):
                yield first, [bytes(text[start:end])]
        first = stop


def _cut_text(text: memoryview) -> Iterator[tuple[int, int]]:
    """Yield start and end of pieces of a text that end with a newline.

    A line of more than 64 MB is cut after a space, where a match may be missed.
    """
    start = 0
    while start < len(text):
        stop = min(len(text), start + _PIECE_BYTES)
        while stop < len(text):
            end = bytes(text[start:stop]).rfind(b"\n") + 1
            if not end and stop - start >= _LONGEST_LINE:
                end = bytes(text[start:stop]).rfind(b" ") + 1 or _find_character(text, stop) - start
            if end:
                stop = start + end
                break
            stop = min(len(text), stop + _PIECE_BYTES)
        yield start, stop
        start = stop


def _find_character(text: memoryview, stop: int) -> int:
    """Return the start of the last character that begins at or before an index."""
    while stop and text[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop
