"""Mask the rows in a part (see lib/corpus/parts.py); batches without a match are copied unchanged.

A text larger than memory is masked in pieces that end at a newline, with the same result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core.conversation import CALLS, TEMPLATE_KWARGS, parse_arguments
from lib.corpus import chat_rows, json_data, parts
from lib.corpus.arrow_arrays import join_texts
from lib.curate.masks.masker import Masker
from lib.curate.masks.matches import MaskedMatches

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_PIECE_BYTES = 16_000_000  # bytes in a piece of a large text
_LONGEST_LINE = 64_000_000  # bytes; a longer line of a large text is cut after a space
_COPIED = 1 << 20
# An escape in JSON, which would look like a letter beside a match.
_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|.)")
_TEXT_FIELDS = (chat_rows.CONTENT, "reasoning_content", "name")  # masked fields of a turn


@dataclass
class MaskedPart:
    """Describes a masked part.

    path: the new file, None if the part has no match. text_bytes: number of bytes that the masks
    add.
    """

    hits: MaskedMatches = field(default_factory=MaskedMatches)
    path: Path | None = None
    text_bytes: int = 0


def mask_part(
    part: Path, out: Path, schema: pa.Schema, masker: Masker, is_kept: np.ndarray | None = None
) -> MaskedPart:
    """Write a part with its matches replaced to `out`, unless it has no match.

    is_kept: bool [rows]; the other rows are not masked, because they are dropped later.
    """
    import numpy as np
    import pyarrow as pa

    masked = MaskedPart()
    rows = 0
    file: BinaryIO | None = None
    # A mapped file is read page by page as needed.
    open_file = pa.memory_map if part.stat().st_size > parts.LARGE_PART else pa.OSFile
    with open_file(str(part)) as source, part.open("rb") as raw:
        start = 0
        while start < source.size():
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
            stop = source.tell()
            is_row_kept = np.ones(batch.num_rows, bool)
            if is_kept is not None:
                is_row_kept = is_kept[rows : rows + batch.num_rows]
            part_of_batch = MaskedPart()
            if parts.is_large_text(batch):
                message = (
                    _mask_large_row(batch, masker, part_of_batch, out) if is_row_kept[0] else None
                )
            else:
                message = _mask_batch(batch, is_row_kept, masker, part_of_batch)
            if file is None and message is not None:
                file = out.open("wb")
                _copy_range(raw, 0, start, file)
            if file is not None and message is None:
                _copy_range(raw, start, stop, file)
            if file is not None and message is not None:
                file.writelines(message)
            masked.hits.extend(part_of_batch.hits, rows)
            masked.text_bytes += part_of_batch.text_bytes
            rows += batch.num_rows
            start = stop
    if file:
        file.close()
        masked.path = out
    return masked


def _copy_range(source: BinaryIO, start: int, stop: int, file: BinaryIO) -> None:
    source.seek(start)
    while start < stop:
        data = source.read(min(_COPIED, stop - start))
        file.write(data)
        start += len(data)


def _mask_batch(
    batch: pa.RecordBatch, is_kept: np.ndarray, masker: Masker, masked: MaskedPart
) -> Iterator[Any] | None:
    """Return the message of a batch with its matches replaced, None if it has none."""
    import numpy as np

    if "text" in batch.schema.names:
        rows = np.arange(batch.num_rows)
        texts = batch.column("text")
        new = _mask_column(texts, is_kept, rows, masker, masked)
        if new is not texts:
            masked.text_bytes += _count_bytes(new) - _count_bytes(texts)
            number = batch.schema.get_field_index("text")
            batch = batch.set_column(number, batch.schema.field(number), new)
    else:
        batch = _mask_conversations(batch, is_kept, masker, masked)
    return iter([batch.serialize()]) if masked.hits.rows else None


def _mask_conversations(
    batch: pa.RecordBatch, is_kept: np.ndarray, masker: Masker, masked: MaskedPart
) -> pa.RecordBatch:
    """Return conversations with the matches in their turns, calls, tools and variables replaced."""
    import numpy as np
    import pyarrow as pa

    number = batch.schema.get_field_index("messages")
    messages = batch.column(number)
    turns = messages.values
    rows = np.repeat(np.arange(batch.num_rows), np.diff(messages.offsets.to_numpy()))
    fields = []
    for kind in turns.type:
        column = turns.field(kind.name)
        if kind.name in _TEXT_FIELDS:
            new = _mask_column(column, is_kept, rows, masker, masked)
            if kind.name == chat_rows.CONTENT:
                masked.text_bytes += _count_bytes(new) - _count_bytes(column)
            column = new
        elif kind.name == CALLS:
            column = _mask_json_column(column, is_kept, rows, masker, masked)
        fields.append(column)
    turns = pa.StructArray.from_arrays(fields, fields=list(turns.type))
    batch = batch.set_column(
        number,
        batch.schema.field(number),
        pa.LargeListArray.from_arrays(messages.offsets, turns),
    )
    for name in ("tools", TEMPLATE_KWARGS):
        number = batch.schema.get_field_index(name)
        column = batch.column(number)
        new = _mask_json_column(column, is_kept, np.arange(batch.num_rows), masker, masked)
        batch = batch.set_column(number, batch.schema.field(number), new)
    return batch


def _list_texts(column: pa.Array, is_kept: np.ndarray, rows: np.ndarray) -> list[bytes | None]:
    """Return the texts of a column, None for each text in a row that is not kept."""
    import pyarrow as pa

    texts = column.cast(pa.large_binary()).to_pylist()
    return (
        texts
        if is_kept.all()
        else [t if is_kept[r] else None for t, r in zip(texts, rows, strict=True)]
    )


def _mask_column(
    column: pa.Array, is_kept: np.ndarray, rows: np.ndarray, masker: Masker, masked: MaskedPart
) -> pa.Array:
    """Return a column of texts with the matches replaced; rows: the row of each text."""
    texts, hits = masker.mask_texts(_list_texts(column, is_kept, rows))
    return _replace_texts(column, texts, hits, rows, masked)


def _mask_json_column(
    column: pa.Array, is_kept: np.ndarray, rows: np.ndarray, masker: Masker, masked: MaskedPart
) -> pa.Array:
    """Return a column of JSON with the matches in its values replaced; it stays valid JSON."""
    texts: list[bytes | None] = []
    hits = MaskedMatches()
    for number, text in enumerate(_list_texts(column, is_kept, rows)):
        new = text
        if text is not None and masker.may_match(_ESCAPE.sub(b" ", text)):
            matches = MaskedMatches()
            value = _mask_value(json_data.load_json(text.decode()), masker, matches)
            if matches.rows:
                new = json_data.dump_json(value)
                hits.extend(matches, number)
        texts.append(new)
    return _replace_texts(column, texts, hits, rows, masked)


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


def _replace_texts(
    column: pa.Array,
    texts: Sequence[bytes | None],
    hits: MaskedMatches,
    rows: np.ndarray,
    masked: MaskedPart,
) -> pa.Array:
    """Return a column with the texts that have a match replaced, and record the matches."""
    import pyarrow as pa

    if not hits.rows:
        return column
    changed = {number for numbers in hits.rows.values() for number in numbers}
    masked.hits.extend(hits.move(rows.tolist()), 0)
    old = column.cast(pa.large_binary()).to_pylist()
    new = [texts[number] if number in changed else text for number, text in enumerate(old)]
    if column.null_count:
        return pa.array(new, pa.large_binary()).view(pa.large_string())
    return join_texts([text or b"" for text in new])


def _count_bytes(column: pa.Array) -> int:
    import pyarrow.compute as pc

    return pc.sum(pc.binary_length(column)).as_py() or 0


def _mask_large_row(
    batch: pa.RecordBatch, masker: Masker, masked: MaskedPart, out: Path
) -> Iterator[bytes] | None:
    """Return the message of a batch with one large text, None if it has no match.

    The message comes in pieces. out: a path; a temporary file is created beside it.
    """
    text = batch.column("text").buffers()[2]
    path = out.with_name(f"{out.name}.text")
    with path.open("wb") as file:
        for start, stop in _cut_text(memoryview(text)):
            (piece,), hits = masker.mask_texts([bytes(text[start:stop])])
            file.write(piece or b"")
            masked.hits.extend(hits, 0)
        size = file.tell()
    if not masked.hits.rows:
        path.unlink()
        return None
    masked.text_bytes += size - text.size
    return _read_message(path, size, batch)


def _read_message(path: Path, size: int, batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the message of a large row with the text in a file, and delete the file."""
    others = [batch.column(name) for name in batch.schema.names if name != "text"]
    with path.open("rb") as text:
        path.unlink()
        yield from parts.format_large_row(text, size, others, batch.schema)


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
