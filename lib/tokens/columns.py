"""The columns of Arrow files that are trained on, a batch of rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import arrow_files
from lib.core.conversation import CALLS, Conversation, Place
from lib.core.errors import ArtifactError, is_of_disk

if TYPE_CHECKING:
    import pyarrow as pa

TEXT, CHAT = "text", "chat"
CHAT_COLUMNS = ("messages", "tools", "weights", *Place._fields)
# Of conversations in the formats that stage 02 reads.
_OF_CHATS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
_STRINGS = ("string", "large_string")


def format_of(names: Collection[str]) -> str:
    """Return the format of a dataset with columns of these names, empty where it has none."""
    return TEXT if "text" in names else CHAT if set(CHAT_COLUMNS) <= set(names) else ""


def hold_chats(names: Collection[str]) -> bool:
    """Tell whether columns of these names hold conversations, in a format that stage 02 reads."""
    return any(each <= set(names) for each in _OF_CHATS)


def read(shards: Sequence[Path], mapped: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some files, as many at a time as they hold; ArtifactError when damaged.

    mapped: only what is looked at is read, for a look at a small part.
    """
    for shard in shards:
        with _opened(shard, mapped) as reader:
            yield from _batches(reader)


def texts(column: Any) -> list[bytes]:
    """Return the texts of an array as UTF-8, an empty one for null."""
    import pyarrow

    binary = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    return [text or b"" for text in binary.to_pylist()]


def conversations(rows: pa.RecordBatch) -> list[tuple[Conversation, Place]]:
    """Return the rows of a chat dataset."""
    flat = _messages(rows)
    names = [field.name for field in flat.type]
    columns = [column.to_pylist() for column in flat.flatten()]
    calls = names.index(CALLS)
    columns[calls] = list(map(_load, columns[calls]))
    turns = [{name: value for name, value in zip(names, values, strict=True) if value is not None}
             for values in zip(*columns, strict=True)]
    ends = _ends(rows)
    tools, weights, source, line, offset = (rows.column(name).to_pylist() for name in (
        "tools", "weights", "source", "line", "offset"))
    return [(Conversation(turns[first:end], _load(tools[row]), weights[row]),
             Place(source[row], line[row], offset[row]))
            for row, (first, end) in enumerate(pairwise(ends))]


def contents(rows: pa.RecordBatch) -> list[list[bytes]]:
    """Return the words of each conversation as UTF-8: contents, thoughts and calls of its turns."""
    columns = [column.to_pylist() for column in _words(rows)]
    turns = [[text.encode() for text in values if text] for values in zip(*columns, strict=True)]
    return [[text for turn in turns[first:end] for text in turn]
            for first, end in pairwise(_ends(rows))]


def content_bytes(rows: pa.RecordBatch) -> int:
    """Return how many bytes of UTF-8 `contents` has, from the offsets alone."""
    import pyarrow.compute
    return sum(pyarrow.compute.sum(pyarrow.compute.binary_length(column)).as_py() or 0
               for column in _words(rows))


def _messages(rows: pa.RecordBatch) -> pa.StructArray:
    return rows.column("messages").flatten()  # of these rows alone


def _ends(rows: pa.RecordBatch) -> list[int]:
    """Return where each conversation begins in `_messages`, and where the last one ends."""
    lengths = rows.column("messages").value_lengths().to_pylist()
    return list(accumulate((length or 0 for length in lengths), initial=0))


def _words(rows: pa.RecordBatch) -> list[Any]:
    messages = _messages(rows)
    return [messages.field(name) for name in ("content", "reasoning_content", CALLS)]


def kinds(shard: Path) -> dict[str, str]:
    """Return the names and types of a file's columns."""
    with _opened(shard, mapped=False) as reader:
        return dict(zip(reader.schema.names, map(str, reader.schema.types), strict=True))


def lack(kinds: Mapping[str, str]) -> str:
    """Return what a file has instead of a column `text` of strings, empty where it has one."""
    if "text" not in kinds:
        return f"columns {', '.join(kinds) or 'none'}"
    return "" if kinds["text"] in _STRINGS else f"`text` of {kinds['text']}"


@contextmanager
def _opened(shard: Path, mapped: bool) -> Iterator[Any]:
    """Open a stream, or a file for random access; errors about its content are ArtifactError."""
    import pyarrow

    path = str(shard)
    try:
        is_file = arrow_files.has_file_format(shard)
        with pyarrow.memory_map(path) if mapped else pyarrow.OSFile(path) as file, \
                (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file) as reader:
            yield reader
    except (OSError, ValueError, KeyError, TypeError) as error:  # a shard that is cut or mangled
        if is_of_disk(error):
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
        raise ArtifactError(f"{path} cannot be read", found=str(error)) from error


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _load(text: str | None) -> Any:
    return json.loads(text) if text else None
