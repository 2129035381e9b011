"""Read files with retries, since a disk or network may fail for a moment; decompress streams."""

from __future__ import annotations

import bz2
import io
import lzma
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, TypeVar

from lib.core.errors import StageError, UsageError, from_os_error, is_missing, is_of_disk
from lib.core.retry import retry

Result = TypeVar("Result")

_LINE_PART = 1 << 17  # bytes of a long line read at once
_PACKED_CHUNK = 1 << 16
_UNPACKED_CHUNK = 1 << 17
_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}
_PAUSES_S = (0.5, 1.0, 2.5)  # between attempts; by then a lost mount is usually back


def with_retries(read: Callable[[], Result], path: object = "") -> Result:
    """Return the result of `read`, with retries for some seconds while a disk fails.

    path: the file, for an error that does not name it. Raises the OSError for a missing file,
    UsageError for one without permission, and StageError if the file cannot be read to its end:
    then its content is unknown.
    """
    try:
        return retry(read, _PAUSES_S, _may_pass)
    except OSError as error:
        if is_missing(error):
            raise
        known = from_os_error(error)
        if isinstance(known, UsageError):
            raise known from error
        raise StageError(
            f"{error.filename or path or 'a file'} cannot be read "
            f"({error.strerror or error}); this does not mean that it is damaged, and "
            "nothing was moved or deleted",
            found=f"on {platform.node()}, several times within some seconds",
            hint="check the disk or the mount (`dmesg` may say more); then run the same "
            "command again to continue",
        ) from error


def _may_pass(error: Exception) -> bool:
    """Return whether reading again may succeed: not if the file or a permission is missing."""
    return (
        isinstance(error, OSError)
        and not is_missing(error)
        and not isinstance(from_os_error(error), UsageError)
    )


class RetryingFile(io.FileIO):
    """Reads a file with retries if the disk fails for a moment.

    If the retries do not help, opening and reading raise StageError. Errors with another cause
    are raised at once.
    """

    def __init__(self, path: str) -> None:
        _read_again_if_failed(lambda: io.FileIO.__init__(self, path), path)

    def readinto(self, target: Any) -> int:
        """Fill a buffer as far as possible; return the number of bytes, 0 at the end."""
        return self._read(lambda: io.FileIO.readinto(self, target))

    def readall(self) -> bytes:
        """Return the rest of the file."""
        return self._read(lambda: io.FileIO.readall(self))

    def _read(self, read: Callable[[], Result]) -> Result:
        offset = self.tell()

        def retry() -> Result:
            self.seek(offset)
            return read()

        return _read_again_if_failed(retry, str(self.name))


class ChunkStream(io.RawIOBase):
    """A stream over an iterable of non-empty chunks of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True, for io.BufferedReader."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill a buffer as far as possible; return the number of bytes, 0 at the end."""
        rest = self._rest or memoryview(next(self._chunks, b""))
        size = min(len(rest), len(target))
        target[:size] = rest[:size]
        self._rest = rest[size:]
        return size


def decompress_file(
    file: BinaryIO, kind: str, note: Callable[[str], None], zstd: Callable[[BinaryIO], BinaryIO]
) -> Iterator[bytes]:
    """Yield the content of a compressed file up to the first damage.

    kind: gzip, bzip2 or xz (members are concatenated), or zstd. note: called with a message about
    the damage. zstd: opens a zstd file.
    """
    try:
        if kind == "zstd":
            yield from iter(partial(zstd(file).read, _UNPACKED_CHUNK), b"")
        else:
            yield from _decompress_members(file, _DECODERS[kind])
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        note(str(error) or type(error).__name__)


def _decompress_members(file: BinaryIO, new_member: Callable[[], Any]) -> Iterator[bytes]:
    member = new_member()
    packed = b""
    while True:
        if member.eof:
            packed = member.unused_data.lstrip(b"\0") or file.read(_PACKED_CHUNK)
            if not packed:
                return
            member = new_member()
        data = member.decompress(packed, _UNPACKED_CHUNK)
        # zlib returns the input that it did not use; the others keep it.
        packed = getattr(member, "unconsumed_tail", b"")
        if data:
            yield data
        elif not member.eof and not packed and getattr(member, "needs_input", True):
            packed = file.read(_PACKED_CHUNK)
            if not packed:
                raise EOFError("the compressed data ends in the middle")


def skip_line(stream: BinaryIO, limit: int | None = None) -> int:
    """Skip to the start of the next line, or past a limit. Return the number of bytes skipped."""
    size = 0
    while (limit is None or size < limit) and (part := stream.readline(_LINE_PART)):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _read_again_if_failed(read: Callable[[], Result], path: str) -> Result:
    """Return the result of `read`, with retries if a disk fails. path: for the error."""
    try:
        return read()
    except OSError as error:
        if not is_of_disk(error):
            raise
    return with_retries(read, path)
