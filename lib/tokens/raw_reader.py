"""Read a span of a raw shard from any document on, in blocks for worker processes to tokenise.

The training process reads blocks: whole raw lines, or the texts of rows. A worker process finds the
text of each document in a block and encodes it (`encode_block` in raw_stream.py).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lib.core import log, placeholders, units
from lib.core.reading import ChunkStream, RetryingFile, decompress_file, skip_line
from lib.tokens.raw_shards import COMPRESSIONS, Span

try:
    import orjson

    _parse_fast: Callable[[bytes], Any] = orjson.loads
except ImportError:
    _parse_fast = json.loads

_BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 16 << 20
_NAMES_SHOWN = 8

# The errors that reading a damaged file can raise.
DAMAGE = (OSError, EOFError, ValueError, NotImplementedError)


class MissingColumn(ValueError):
    """Raised if a Parquet file lacks the text column."""


class Block(NamedTuple):
    """Contains some documents: whole raw lines, or the texts of rows.

    start: the place of the first document, in bytes of the (decompressed) file or rows of the span.
    """

    content: bytes | list[bytes | None]
    start: int


def read_blocks(
    path: Path, span: Span, place: int | None, text_field: str, on_long_line: Callable[[int], None]
) -> Iterator[Block]:
    """Yield the blocks of a span from the document at `place` on, or from its beginning.

    on_long_line: called with the place of each line that is too long and therefore skipped. If a
    file is damaged, raises one of DAMAGE after the blocks that could be read.
    """
    if placeholder := placeholders.find_in_file(path):
        raise ValueError(f"it is {placeholder}")
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path, span, place or 0, text_field)
        return
    compression = COMPRESSIONS.get(path.suffix.lower())
    with io.BufferedReader(RetryingFile(str(path))) as plain:
        damage: list[str] = []
        file = (
            io.BufferedReader(
                ChunkStream(decompress_file(plain, compression, damage.append, _open_frames)),
                _BLOCK_BYTES,
            )
            if compression
            else plain
        )
        if compression and place:
            log.info(f"{path.name}: decompressing {units.size(place)} again to continue after them")
        if compression and (placeholder := placeholders.find_placeholder(file.peek())):
            raise ValueError(f"it contains {placeholder}")
        yield from _read_lines(file, span, place, on_long_line)
        if damage:
            raise EOFError(*damage)


def read_field_names(path: Path, span: Span) -> list[str]:
    """Return the field names of a span's first record, or its columns; [] if it is unreadable."""
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as parquet:
                return list(parquet.schema_arrow.names)
        block = next(read_blocks(path, span, None, "", lambda place: None))
        assert isinstance(block.content, bytes)
        first = next(line for line in block.content.split(b"\n") if line.strip())
        return list(_parse_line(first))
    except (*DAMAGE, StopIteration, RecursionError, TypeError):
        return []


def _read_lines(
    file: BinaryIO, span: Span, place: int | None, on_long_line: Callable[[int], None]
) -> Iterator[Block]:
    offset = place or 0
    if place:
        _skip_bytes(file, place)
    elif place is None and span.start:
        # A line cut by the start of the span belongs to the previous span.
        _skip_bytes(file, span.start - 1)
        offset = span.start - 1 + skip_line(file)
    while span.end is None or offset < span.end:
        room = _BLOCK_BYTES if span.end is None else span.end - offset
        block = file.read(min(_BLOCK_BYTES, room))
        if not block and span.end is not None:
            raise EOFError(f"it ends at byte {offset:,} but had {span.end:,} when the run began")
        if not block:
            return
        rest = b"" if block.endswith(b"\n") else file.readline(LONGEST_LINE_BYTES)
        following = offset + len(block) + len(rest)
        if len(rest) == LONGEST_LINE_BYTES and not rest.endswith(b"\n"):
            block = block[: block.rfind(b"\n") + 1]
            rest = b""
            on_long_line(offset + len(block))
            following += skip_line(file)
        yield Block(block + rest, offset)
        offset = following


def _skip_bytes(file: BinaryIO, amount: int) -> None:
    """Skip the first bytes of a file; a compressed file is decompressed to skip them."""
    if file.seekable():
        file.seek(amount)
        return
    while amount and (skipped := len(file.read(min(_BLOCK_BYTES, amount)))):
        amount -= skipped


def _open_frames(file: BinaryIO, kind: str) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), kind)


def _read_parquet(path: Path, span: Span, place: int, text_field: str) -> Iterator[Block]:
    from pyarrow.parquet import ParquetFile

    with io.BufferedReader(RetryingFile(str(path))) as file, ParquetFile(file) as parquet:
        if text_field not in (names := parquet.schema_arrow.names):
            raise MissingColumn(f"no column `{text_field}`; the columns are {', '.join(names)}")
        first = 0
        end = parquet.num_row_groups if span.end is None else span.end
        for group in range(span.start, end):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows > place:
                yield from _read_row_group(parquet, group, text_field, first, place)
            first += rows


def _read_row_group(
    parquet: Any, group: int, text_field: str, first: int, place: int
) -> Iterator[Block]:
    """Yield the rows of a row group from `place` on. first: its first row's index in the span."""
    metadata = parquet.metadata.row_group(group)
    average = max(1, metadata.total_byte_size // max(metadata.num_rows, 1))
    for batch in parquet.iter_batches(max(1, _BLOCK_BYTES // average), [group], [text_field]):
        skipped = max(0, place - first)
        if skipped < len(batch):
            yield Block(_decode_rows(batch.slice(skipped)), first + skipped)
        first += len(batch)


def _decode_rows(batch: Any) -> list[bytes | None]:
    import pyarrow

    return batch.column(0).cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()


@dataclass
class SkippedRecords:
    """Counts skipped records.

    counts: reason, a noun such as `no field text` → number of records. first: reason → description
    of the first record.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, description: str = "", count: int = 1) -> None:
        """Count skipped records."""
        # Before the counts, since another thread reads those first.
        self.first.setdefault(reason, description)
        self.counts[reason] = self.counts.get(reason, 0) + count


def find_texts(
    block: Block, text_field: str, skipped: SkippedRecords
) -> tuple[list[bytes], list[int]]:
    """Return the texts of a block (UTF-8) and their places; count the skipped records."""
    texts = []
    places = []
    for place, text in _find_documents(block, text_field, skipped):
        if text:
            texts.append(text)
            places.append(place)
        elif text is not None:
            skipped.add("an empty text", f"at {place:,}")
    return texts, places


def _find_documents(
    block: Block, text_field: str, skipped: SkippedRecords
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the place and text of each record; the text is None if the record is skipped."""
    if not isinstance(block.content, bytes):
        yield from ((place, text or b"") for place, text in enumerate(block.content, block.start))
        return
    offset = block.start
    for line in block.content.split(b"\n"):
        if line.strip():
            yield offset, _find_text(line, text_field, offset, skipped)
        offset += len(line) + 1


def _find_text(line: bytes, text_field: str, place: int, skipped: SkippedRecords) -> bytes | None:
    try:
        value = _parse_line(line)
    except (ValueError, RecursionError) as error:
        skipped.add("a line that is not JSON", f"at {place:,}: {str(error).splitlines()[0]}")
        return None
    if not isinstance(value, dict):
        skipped.add("a line that is not a JSON object", f"at {place:,}")
        return None
    if text_field not in value:
        names = ", ".join(list(value)[:_NAMES_SHOWN]) or "none"
        skipped.add(f"no field `{text_field}`", f"at {place:,}: its fields are {names}")
        return None
    text = value[text_field]
    if not isinstance(text, str):
        skipped.add(f"`{text_field}` that is not a string", f"at {place:,}")
        return None
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _parse_line(line: bytes) -> Any:
    try:
        return _parse_fast(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8, lone surrogates, NaN
        return json.loads(line.decode("utf-8-sig", "replace"))
