"""Read the text or chat columns of Arrow files, one batch of rows at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import artifacts
from lib.core.conversation import CALLS, TEMPLATE_KWARGS, TEXTS, Place
from lib.core.errors import ArtifactError, is_of_disk

if TYPE_CHECKING:
    import pyarrow as pa

TEXT = "text"
CHAT = "chat"
CHAT_COLUMNS = ("messages", "tools", "weights", *Place._fields)
# The columns of each conversation format that stage 02 reads.
_CHAT_FORMATS = (
    {"messages"},
    {"conversations"},
    {"prompt", "completion"},
    {"instruction", "output"},
)
STRINGS = ("string", "large_string", "string_view")
_CODED_STRINGS = tuple(f"dictionary<values={kind}," for kind in STRINGS)


def is_string(kind: str) -> bool:
    """Return whether the name of an Arrow type is one of strings."""
    return kind in STRINGS or kind.startswith(_CODED_STRINGS)


def detect_format(names: Collection[str]) -> str:
    """Return TEXT or CHAT for a dataset with these column names, "" for other columns."""
    if "text" in names:
        return TEXT
    return CHAT if set(CHAT_COLUMNS) <= set(names) else ""


def are_chat_columns(names: Collection[str]) -> bool:
    """Return whether these columns are conversations in a format that stage 02 reads."""
    return any(columns <= set(names) for columns in _CHAT_FORMATS)


def read_batches(shards: Sequence[Path], mapped: bool) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of Arrow files. Raises ArtifactError if a file is damaged.

    mapped: map the files, so only the parts in use are read. The pages of a batch are removed from
    the memory of this process when the next batch is asked for; if a caller still uses the batch,
    they come back from the page cache.
    """
    for shard in shards:
        with _open_reader(shard, mapped) as (reader, mapping):
            for batch in _list_batches(reader):
                yield batch
                if mapping:
                    mapping.madvise(mmap.MADV_DONTNEED)


def decode_texts(column: Any) -> list[bytes]:
    """Return the texts of an array as UTF-8, with b"" for null."""
    import pyarrow

    binary = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    return [text or b"" for text in binary.to_pylist()]


def list_values(column: Any) -> list[Any]:
    """Return the values of an array. Raises ArtifactError if a string is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise ArtifactError(
            "the dataset is damaged: a string in it is not UTF-8", found=str(error)
        ) from None


def list_contents(rows: pa.RecordBatch) -> list[list[bytes]]:
    """Return the texts of each conversation as UTF-8: contents, thoughts and calls of its turns."""
    columns = [list_values(column) for column in _select_texts(rows)]
    turns = [[text.encode() for text in values if text] for values in zip(*columns, strict=True)]
    return [
        [text for turn in turns[first:end] for text in turn]
        for first, end in pairwise(find_conversation_edges(rows))
    ]


def select_chats(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of conversations; the column that older datasets lack is null."""
    import pyarrow

    if rows.schema.get_field_index(TEMPLATE_KWARGS) < 0:
        nulls = pyarrow.nulls(len(rows), pyarrow.large_string())
        rows = rows.append_column(TEMPLATE_KWARGS, nulls)
    return rows.select([*CHAT_COLUMNS, TEMPLATE_KWARGS])


def count_content_bytes(rows: pa.RecordBatch) -> int:
    """Return the UTF-8 bytes that `list_contents` would return, from the offsets alone."""
    import pyarrow.compute

    return sum(
        pyarrow.compute.sum(pyarrow.compute.binary_length(column)).as_py() or 0
        for column in _select_texts(rows)
    )


def flatten_messages(rows: pa.RecordBatch) -> pa.StructArray:
    """Return the messages of all rows, concatenated."""
    return rows.column("messages").flatten()  # respects slices, unlike `.values`


def read_field(messages: pa.StructArray, name: str) -> pa.Array:
    """Return a field of the messages as an Arrow `large_string` array; null where it is absent."""
    import pyarrow

    if messages.type.get_field_index(name) < 0:
        return pyarrow.nulls(len(messages), pyarrow.large_string())
    return messages.flatten()[messages.type.get_field_index(name)].cast(pyarrow.large_string())


def find_conversation_edges(rows: pa.RecordBatch) -> list[int]:
    """Return the index of each conversation's first message, then the number of messages."""
    lengths = rows.column("messages").value_lengths().to_pylist()
    return list(accumulate((length or 0 for length in lengths), initial=0))


def _select_texts(rows: pa.RecordBatch) -> list[Any]:
    messages = flatten_messages(rows)
    return [read_field(messages, name) for name in ("content", "reasoning_content", CALLS)]


def describe_chat_problem(shard: Path) -> str:
    """Return how a file's columns differ from those of a chat dataset, "" if they do not."""
    import pyarrow

    with _open_reader(shard, mapped=False) as (reader, _):
        schema = reader.schema
    if missing := [name for name in CHAT_COLUMNS if schema.get_field_index(name) < 0]:
        return f"no column {', '.join(missing)}"
    types = pyarrow.types
    expected_types = {
        "tools": (_is_text, "JSON as a string"),
        TEMPLATE_KWARGS: (_is_text, "JSON as a string"),
        "source": (_is_text, "a string"),
        "line": (types.is_integer, "an integer"),
        "offset": (types.is_integer, "an integer"),
        "weights": (_is_list_of_numbers, "a list of numbers"),
        "messages": (
            _is_list_of_messages,
            "a list of structs with role and content, all fields strings",
        ),
    }
    wrong = [
        f"`{name}` is {schema.field(name).type}, not {expected}"
        for name, (fits, expected) in expected_types.items()
        if schema.get_field_index(name) >= 0
        and not types.is_null(schema.field(name).type)
        and not fits(schema.field(name).type)
    ]
    if types.is_null(schema.field("messages").type):
        wrong.append("`messages` is empty in all rows")
    return "; ".join(wrong)


def _is_text(kind: pa.DataType) -> bool:
    return is_string(str(kind)) or str(kind) == "null"


def _is_list(kind: pa.DataType) -> bool:
    from pyarrow import types

    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    from pyarrow import types

    return _is_list(kind) and any(
        fits(kind.value_type)
        for fits in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    )


def _is_list_of_messages(kind: pa.DataType) -> bool:
    from pyarrow import types

    if not _is_list(kind) or not types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= fields.keys() and all(
        _is_text(fields[name]) for name in (*TEXTS, CALLS) if name in fields
    )


def read_schema(shard: Path) -> pa.Schema:
    """Return the schema of a file."""
    with _open_reader(shard, mapped=False) as (reader, _):
        return reader.schema


def read_column_types(shard: Path) -> dict[str, str]:
    """Return the names and types of a file's columns."""
    schema = read_schema(shard)
    return dict(zip(schema.names, map(str, schema.types), strict=True))


def describe_text_problem(kinds: Mapping[str, str]) -> str:
    """Describe the columns of a file whose `text` lacks strings, "" if it contains strings."""
    if "text" not in kinds:
        return f"columns {', '.join(kinds) or 'none'}"
    if kinds["text"] == "null":
        return "`text` without a value in any row"
    return "" if is_string(kinds["text"]) else f"`text` of {kinds['text']}"


@contextmanager
def _open_reader(shard: Path, mapped: bool) -> Iterator[tuple[Any, mmap.mmap | None]]:
    """Open an Arrow stream or file; return its reader, and the map of the file if it is mapped.

    Raises ArtifactError if the content is damaged.
    """
    import pyarrow

    path = str(shard)
    try:
        is_file = artifacts.has_file_format(shard)
        mapping = _map_file(shard) if mapped else None
        with (
            pyarrow.BufferReader(mapping) if mapping else pyarrow.OSFile(path) as file,
            (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file) as reader,
        ):
            yield reader, mapping
    except (OSError, ValueError, KeyError, TypeError) as error:  # the shard is cut short or corrupt
        if is_of_disk(error):
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
        raise ArtifactError(f"{path} cannot be read", found=str(error)) from error


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _list_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)
