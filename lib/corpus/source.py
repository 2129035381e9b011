"""One input file as the readers see it: decompressed, sniffed, as a whole or line by line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import PurePath
from types import TracebackType

from lib.corpus import encoding, inflate, kinds

_BUFFER = 1 << 17


class Source:
    """An open input file, or the part of it that starts in [start, stop) (JSON Lines only).

    kind: what it holds, once decompressed. head: its first bytes. start, stop: in bytes.
    """

    def __init__(self, path: str, start: int = 0, stop: int | None = None) -> None:
        self.start, self.stop = start, stop
        self._inflated: inflate.Inflated | None = None
        self._open(io.FileIO(path), path)
        if self.kind in inflate.SUFFIXES:
            name, kind = PurePath(path), self.kind
            inner = name.with_suffix("") if name.suffix.lower() in inflate.SUFFIXES[kind] else name
            self._inflated = inflate.Inflated(self._stream, kind)
            self._open(self._inflated, str(inner))

    def _open(self, raw: io.RawIOBase, name: str) -> None:
        self._stream = io.BufferedReader(raw, _BUFFER)
        self.head = self._stream.peek(kinds.HEAD_BYTES)[:kinds.HEAD_BYTES]
        self.kind = "jsonl" if self.start else kinds.sniff(name, self.head)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stream.close()

    @property
    def damage(self) -> str:
        """Why the compressed data ended too early, "" if it did not; known once all is read."""
        return self._inflated.damage if self._inflated else ""

    def read(self) -> bytes:
        """Return the whole content."""
        return self._stream.read()

    def lines(self) -> Iterator[tuple[int | None, bytes]]:
        """Yield (offset, line) of UTF-8 without BOM, split at `\\n` bytes only and keeping them.

        UTF-16 is turned into UTF-8 first, and has no offsets. Of a part: the lines that start in
        it.
        """
        if kinds.is_utf16(self.head):
            text, _ = encoding.decode(self._stream.read())
            for line in io.BytesIO(text.encode()):
                yield None, line
            return
        position = 0
        if self.start:
            self._stream.seek(self.start - 1)
            position = self.start - 1 + len(self._stream.readline())
        elif self.head.startswith(encoding.UTF8_BOM):
            position = len(self._stream.read(len(encoding.UTF8_BOM)))
        while self.stop is None or position < self.stop:
            if not (line := self._stream.readline()):
                return
            yield position, line
            position += len(line)
