"""The columns of Arrow files that are trained on, a batch of rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import arrow_files
from lib.core.conversation import CALLS, Conversation, Place
from lib.core.errors import ArtifactError, is_of_disk

if TYPE_CHECKING:
    import pyarrow as pa

_STRINGS = ("string", "large_string")


def read(shards: Sequence[Path], mapped: bool) -> Iterator[Any]:
    """Yield the text of some files, an Arrow array per batch of rows; ArtifactError when damaged.

    mapped: only what is looked at is read, for a look at a small part.
    """
    for shard in shards:
        with _opened(shard, mapped) as reader:
            for batch in _batches(reader):
                yield batch.column("text")


def texts(column: Any) -> list[bytes]:
    """Return the texts of an array as UTF-8, an empty one for null."""
    import pyarrow

    binary = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    return [text or b"" for text in binary.to_pylist()]


def conversations(rows: pa.RecordBatch) -> list[tuple[Conversation, Place]]:
    """Return the rows of a chat dataset."""
    flat = rows.column("messages").flatten()  # of these rows alone
    names = [field.name for field in flat.type]
    columns = [column.to_pylist() for column in flat.flatten()]
    calls = names.index(CALLS)
    columns[calls] = list(map(_load, columns[calls]))
    turns = [{name: value for name, value in zip(names, values, strict=True) if value is not None}
             for values in zip(*columns, strict=True)]
    lengths = rows.column("messages").value_lengths().to_pylist()
    ends = list(accumulate(lengths, initial=0))
    tools, weights, source, line, offset = (rows.column(name).to_pylist() for name in (
        "tools", "weights", "source", "line", "offset"))
    return [(Conversation(turns[first:end], _load(tools[row]), weights[row]),
             Place(source[row], line[row], offset[row]))
            for row, (first, end) in enumerate(pairwise(ends))]


def lack(shard: Path) -> str:
    """Return what a file has instead of a column `text` of strings, empty where it has one."""
    with _opened(shard, mapped=False) as reader:
        kinds = dict(zip(reader.schema.names, map(str, reader.schema.types), strict=True))
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
