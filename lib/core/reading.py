"""Reads what a disk or a network may fail to give for a moment, which is no damage; streams."""

from __future__ import annotations

import bz2
import io
import lzma
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, TypeVar

from lib.core.errors import StageError, UsageError, from_os_error, is_missing, is_of_disk

Result = TypeVar("Result")

_LINE_PART = 1 << 17  # bytes of a long line read at once
_PACKED_CHUNK = 1 << 16
_UNPACKED_CHUNK = 1 << 17
_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}
_PAUSES_S = (0.5, 1.0, 2.5)  # between the attempts; a mount that was lost is mostly back by then


def patiently(read: Callable[[], Result], path: object = "") -> Result:
    """Return what `read` returns, tried again for some seconds while a disk fails to read.

    path: the file, for an error that does not name it.
    Raises the OSError of a file that is not there, UsageError when it may not be read, and
    StageError when it cannot be read to the end: what it holds is not known then.
    """
    for pause in (*_PAUSES_S, None):
        try:
            return read()
        except OSError as error:
            if is_missing(error):
                raise
            known = from_os_error(error)
            if isinstance(known, UsageError):
                raise known from error
            if pause is None:
                raise StageError(
                    f"{error.filename or path or 'a file'} cannot be read "
                    f"({error.strerror or error}); that does not mean that it is damaged, and "
                    "nothing was moved or deleted",
                    found=f"on {platform.node()}, several times in some seconds",
                    hint="see to the disk or the mount there (`dmesg` tells more); the same "
                    "command then goes on",
                ) from error
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


class PatientFile(io.FileIO):
    """Reads a file, also where the disk fails for a moment.

    Opening and reading are tried again as by `patiently`, which raises StageError in the end; other
    errors are raised at once.
    """

    def __init__(self, path: str) -> None:
        _tried(lambda: io.FileIO.__init__(self, path), path)

    def readinto(self, target: Any) -> int:
        """Fill as much of a buffer as there is; 0 at the end."""
        return self._read(lambda: io.FileIO.readinto(self, target))

    def readall(self) -> bytes:
        """Return all that is left."""
        return self._read(lambda: io.FileIO.readall(self))

    def _read(self, read: Callable[[], Result]) -> Result:
        at = self.tell()

        def retry() -> Result:
            self.seek(at)
            return read()

        return _tried(retry, str(self.name))


class ChunkStream(io.RawIOBase):
    """Reads chunks of bytes, none of them empty, one after the other."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Tell io.BufferedReader that this can be read."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill as much of a buffer as there is; 0 at the end."""
        rest = self._rest or memoryview(next(self._chunks, b""))
        size = min(len(rest), len(target))
        target[:size] = rest[:size]
        self._rest = rest[size:]
        return size


def unpacked(
    file: BinaryIO, kind: str, note: Callable[[str], None], zstd: Callable[[BinaryIO], BinaryIO]
) -> Iterator[bytes]:
    """Yield the content of a compressed file up to the first damage, which is noted in words.

    kind: gzip, bzip2, xz (several members in a row are one content), or what `zstd` opens.
    """
    try:
        if kind == "zstd":
            yield from iter(partial(zstd(file).read, _UNPACKED_CHUNK), b"")
        else:
            yield from _unpacked(file, _DECODERS[kind])
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        note(str(error) or type(error).__name__)


def _unpacked(file: BinaryIO, new_member: Callable[[], Any]) -> Iterator[bytes]:
    member = new_member()
    packed = b""
    while True:
        if member.eof:
            packed = member.unused_data.lstrip(b"\0") or file.read(_PACKED_CHUNK)
            if not packed:
                return
            member = new_member()
        data = member.decompress(packed, _UNPACKED_CHUNK)
        # zlib hands back what it did not look at, the others keep it.
        packed = getattr(member, "unconsumed_tail", b"")
        if data:
            yield data
        elif not member.eof and not packed and getattr(member, "needs_input", True):
            packed = file.read(_PACKED_CHUNK)
            if not packed:
                raise EOFError("the compressed data ends in the middle")


def skip_line(stream: BinaryIO, limit: int | None = None) -> int:
    """Skip to the start of the next line, or past a limit; return how many bytes that were."""
    size = 0
    while (limit is None or size < limit) and (part := stream.readline(_LINE_PART)):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _tried(read: Callable[[], Result], path: str) -> Result:
    """Return what `read` returns, patiently if a disk fails; path: for the error."""
    try:
        return read()
    except OSError as error:
        if not is_of_disk(error):
            raise
    return patiently(read, path)
