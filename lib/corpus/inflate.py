"""Reads compressed files so that what lies before a damage is not lost."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from typing import Any, BinaryIO

SUFFIXES = {"gzip": (".gz", ".gzip"), "bzip2": (".bz2",), "xz": (".xz",), "zstd": (".zst", ".zstd")}
_CHUNK = 1 << 16
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class Inflated(io.RawIOBase):
    """The content of a compressed stream (several members in a row are one content).

    damage: why the stream ended too early, "" if it did not; what came before can be read.
    """

    def __init__(self, file: BinaryIO, kind: str) -> None:
        super().__init__()
        self.damage = ""
        self._file = file
        self._decoder = _ZstdDecoder(file) if kind == "zstd" else _MemberDecoder(file, kind)

    def readable(self) -> bool:
        """Tell io.BufferedReader that this can be read."""
        return True

    def close(self) -> None:
        """Close the compressed file too."""
        self._file.close()
        super().close()

    def readinto(self, target: Any) -> int:
        """Fill as much of a buffer as there is; 0 at the end or at a damage."""
        if self.damage:
            return 0
        try:
            data = self._decoder.read(len(target))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self.damage = str(error) or type(error).__name__
            return 0
        target[:len(data)] = data
        return len(data)


class _MemberDecoder:
    """gzip, bzip2 and xz through the decompressors of the standard library."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._file = file
        self._new = {"gzip": lambda: zlib.decompressobj(_GZIP_WINDOW),
                     "bzip2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}[kind]
        self._member = self._new()
        self._input = b""

    def read(self, limit: int) -> bytes:
        """Return up to `limit` bytes, b"" at the end; EOFError or a codec's error when damaged."""
        while True:
            if self._member.eof:
                self._input = self._member.unused_data.lstrip(b"\0") or self._file.read(_CHUNK)
                if not self._input:
                    return b""
                self._member = self._new()
            data = self._member.decompress(self._input, limit)
            # zlib hands back what it did not look at, the others keep it.
            self._input = getattr(self._member, "unconsumed_tail", b"")
            if data:
                return data
            if not self._member.eof and not self._input and self._wants_input():
                self._input = self._file.read(_CHUNK)
                if not self._input:
                    raise EOFError("the compressed data ends in the middle")

    def _wants_input(self) -> bool:
        return getattr(self._member, "needs_input", True)


class _ZstdDecoder:
    """zstd through pyarrow, which every dataset needs anyway."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa
        self._stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    def read(self, limit: int) -> bytes:
        """Return up to `limit` bytes, b"" at the end; OSError when damaged."""
        return self._stream.read(limit)
