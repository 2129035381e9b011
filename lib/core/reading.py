"""Read files with retries, since a disk or network may fail for a moment; decompress streams."""

from __future__ import annotations

import bz2
import fcntl
import io
import lzma
import os
import platform
import posixpath
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar

from lib.core.errors import StageError, UsageError, from_os_error, is_missing, is_of_disk
from lib.core.retry import retry

Result = TypeVar("Result")

_LINE_PART = 1 << 17  # bytes of a long line read at once
_PACKED_CHUNK = 1 << 16
_UNPACKED_CHUNK = 1 << 17
# Suffix of a compressed file → kind of compression.
COMPRESSIONS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lzma": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".lz4": "lz4",
}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_COMPRESSED_MAGICS = tuple(_COMPRESSED)
_LZMA_MAGIC = b"]\x00\x00"  # of the format before xz, which only the suffix makes certain
_SKIPPABLE = b"\x2a\x4d\x18"  # of zstd and lz4, after a byte from 0x50 to 0x5f
_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}
_LONGEST_WINDOW = 31  # of zstd, as a power of 2; pyarrow decodes windows of up to 27
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


class UndecodableData(OSError):
    """Raised for compressed data that another program can decode; the message names it."""


def sniff_compression(name: str, head: bytes) -> str:
    """Return the kind of compression of a file by its first bytes, "" if it is not compressed.

    Frames that zstd and lz4 skip, such as pzstd writes, may precede the data.
    """
    suffix = posixpath.splitext(name.lower())[1]
    while len(head) > 8 and head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
        size = 8 + int.from_bytes(head[4:8], "little")
        if size >= len(head):
            return "lz4" if suffix == ".lz4" else "zstd"
        head = head[size:]
    if head.startswith(_COMPRESSED_MAGICS):
        return next(kind for magic, kind in _COMPRESSED.items() if head.startswith(magic))
    return "xz" if suffix == ".lzma" and head.startswith(_LZMA_MAGIC) else ""


def strip_compression(name: str) -> str:
    """Return the name of a compressed file without the suffix of the compression."""
    stem, suffix = posixpath.splitext(name)
    return stem if suffix.lower() in COMPRESSIONS else name


def decompress_file(
    file: BinaryIO,
    kind: str,
    note: Callable[[str], None],
    open_frames: Callable[[BinaryIO, str], BinaryIO],
    lock: str | None = None,
) -> Iterator[bytes]:
    """Yield the content of a compressed file up to the first damage.

    kind: one of COMPRESSIONS; members and frames are concatenated. note: called with a message
    about the damage. open_frames: opens a zstd or lz4 file. lock: a directory that is locked while
    zstd data with a window of more than 128 MB is decoded, so that only one of several processes
    needs the memory. Raises UndecodableData if another program is needed.
    """
    try:
        if kind in _DECODERS:
            yield from _decompress_members(file, _DECODERS[kind])
        else:
            yield from _decompress_frames(file, kind, open_frames, lock)
    except UndecodableData:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        note(str(error) or type(error).__name__)


def _decompress_frames(
    file: BinaryIO,
    kind: str,
    open_frames: Callable[[BinaryIO, str], BinaryIO],
    lock: str | None,
) -> Iterator[bytes]:
    size = 0
    frames = open_frames(file, kind)  # closes the file when it is deleted
    try:
        for data in iter(partial(frames.read, _UNPACKED_CHUNK), b""):
            size += len(data)
            yield data
        return
    except OSError as error:
        if "ictionary" in str(error):
            raise UndecodableData(
                "zstd data that needs a dictionary; `zstd -dc -D DICTIONARY FILE | zstd -o NEW` "
                "makes it readable"
            ) from None
        if "too much memory" not in str(error):
            raise
    file.seek(0)
    for data in _decompress_long_windows(file, lock):
        yield from filter(None, [data[size:]])
        size = max(0, size - len(data))


def _decompress_long_windows(file: BinaryIO, lock: str | None) -> Iterator[bytes]:
    """Yield the content of zstd data with windows of up to 2 GB, which is held in memory."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UndecodableData(
            "zstd data with a window of more than 128 MB (`zstd --long`); "
            "`pip install backports-zstd` lets this program read it, and "
            "`zstd -dc --long=31 FILE | zstd -o NEW` makes it readable"
        ) from None
    options = {int(zstd.DecompressionParameter.window_log_max): _LONGEST_WINDOW}
    descriptor = os.open(lock, os.O_RDONLY) if lock else None
    try:
        if descriptor is not None:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield from _decompress_members(file, lambda: zstd.ZstdDecompressor(options=options))
    except zstd.ZstdError as error:
        raise OSError(str(error)) from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


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
