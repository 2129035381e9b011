"""Reading a piece of a shard from any document on, in blocks that a worker looks into."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lib.core import log, units
from lib.core.reading import PatientFile
from lib.tokens.shards import COMPRESSIONS, Piece

_BLOCK_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 10
LONGEST_LINE_BYTES = 16 << 20

# What a damaged file raises on the way: OSError, or one of these.
DAMAGE = (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError)


class NoColumn(ValueError):
    """A Parquet file without the column of the text."""


class Block(NamedTuple):
    """Some documents: whole lines as they lie, or the texts of rows.

    start: the place of the first, in bytes of the (decompressed) file or rows of the piece.
    """

    content: bytes | list[bytes | None]
    start: int


def read(path: Path, piece: Piece, place: int | None, field: str,
         too_long: Callable[[int], None]) -> Iterator[Block]:
    """Yield the blocks of a piece from the document at `place` on, or from its beginning.

    too_long: told the place of each line that is left out since it is too long. Raises one of
    DAMAGE where a file is damaged, after all that could be read.
    """
    if path.suffix.lower() == ".parquet":
        yield from _rows(path, piece, place or 0, field)
        return
    compression = COMPRESSIONS.get(path.suffix.lower())
    with io.BufferedReader(PatientFile(str(path))) as plain:
        inflated = _Inflated(plain, compression) if compression else None
        file = io.BufferedReader(inflated, _BLOCK_BYTES) if inflated else plain
        if inflated and place:
            log.info(f"{path.name}: decompressing {units.size(place)} again, up to where the run "
                     "stood")
        yield from _lines(file, piece, place, too_long)
        if inflated and inflated.damage:
            raise EOFError(inflated.damage)


def _lines(file: BinaryIO, piece: Piece, place: int | None, too_long: Callable[[int], None],
           ) -> Iterator[Block]:
    here = place or 0
    if place:
        _forward(file, place)
    elif place is None and piece.start:
        # The line that is cut here belongs to the piece before; one that begins here does not.
        _forward(file, piece.start - 1)
        here = piece.start - 1 + _skip_line(file)
    while piece.end is None or here < piece.end:
        left = _BLOCK_BYTES if piece.end is None else piece.end - here
        block = file.read(min(_BLOCK_BYTES, left))
        if not block and piece.end is not None:
            raise EOFError(f"it ends at byte {here:,}, and had {piece.end:,} when the run began")
        if not block:
            return
        rest = b"" if block.endswith(b"\n") else file.readline(LONGEST_LINE_BYTES)
        following = here + len(block) + len(rest)
        if len(rest) == LONGEST_LINE_BYTES and not rest.endswith(b"\n"):
            block, rest = block[:block.rfind(b"\n") + 1], b""
            too_long(here + len(block))
            following += _skip_line(file)
        yield Block(block + rest, here)
        here = following


def _forward(file: BinaryIO, amount: int) -> None:
    """Go to a place, by decompressing what lies before it where there is no other way."""
    if file.seekable():
        file.seek(amount)
        return
    while amount and (skipped := len(file.read(min(_BLOCK_BYTES, amount)))):
        amount -= skipped


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line; return the bytes that were left of it."""
    skipped = 0
    while part := file.readline(_BLOCK_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


class _Inflated(io.RawIOBase):
    """The content of a compressed file up to a damage, whatever amounts are asked for.

    damage: why it ends too early, "" if it does not.
    """

    def __init__(self, file: BinaryIO, compression: str) -> None:
        super().__init__()
        self.damage, self._left = "", b""
        self._file = _decompressed(file, compression)

    def readable(self) -> bool:
        """Tell io.BufferedReader that this can be read."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill as much of a buffer as there is; 0 at the end."""
        if not self._left and not self.damage:
            try:
                self._left = self._file.read1(_CHUNK_BYTES)
            except DAMAGE as error:
                self.damage = str(error) or type(error).__name__
        taken = min(len(target), len(self._left))
        target[:taken], self._left = self._left[:taken], self._left[taken:]
        return taken


def _decompressed(file: BinaryIO, compression: str) -> Any:
    if compression == "zstd":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    opener = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[compression]
    return opener(file)


def _rows(path: Path, piece: Piece, place: int, field: str) -> Iterator[Block]:
    from pyarrow.parquet import ParquetFile

    with io.BufferedReader(PatientFile(str(path))) as file, ParquetFile(file) as parquet:
        if field not in parquet.schema_arrow.names:
            raise NoColumn(f"no column `{field}`, it has {', '.join(parquet.schema_arrow.names)}")
        first, end = 0, parquet.num_row_groups if piece.end is None else piece.end
        for group in range(piece.start, end):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows > place:
                yield from _group(parquet, group, field, first, place)
            first += rows


def _group(parquet: Any, group: int, field: str, first: int, place: int) -> Iterator[Block]:
    """Yield the rows of a row group from `place` on; its first row has the number `first`."""
    metadata = parquet.metadata.row_group(group)
    average = max(1, metadata.total_byte_size // max(metadata.num_rows, 1))
    for batch in parquet.iter_batches(max(1, _BLOCK_BYTES // average), [group], [field]):
        done = max(0, place - first)
        if done < len(batch):
            yield Block(_texts(batch.slice(done)), first + done)
        first += len(batch)


def _texts(batch: Any) -> list[bytes | None]:
    import pyarrow

    return batch.column(0).cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
