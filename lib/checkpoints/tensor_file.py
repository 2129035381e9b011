"""A safetensors file written in pieces: hashed and sent to the disk while the next is made.

The pieces go past the page cache where the file system allows it (O_DIRECT). That costs a tenth
of the processor time of a buffered write, does not push out what a run that goes on reads, and
lets the file be read back from the disk itself.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lib.core import commands, hashing
from lib.core.errors import ArtifactError
from lib.models.tensors import make_header

_PIECE = 8 << 20  # bytes
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Entry:
    """A tensor as it will be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class TensorFile:
    """Writes one safetensors file; durable when the `with` ends without an error.

    While a piece is filled here, others are hashed and written by a thread each.
    """

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self._entries = entries
        self._hashers = {kind: hashing.new(kind) for kind in {"sha256", hashing.FAST}}
        self._threads = [ThreadPoolExecutor(1) for _ in range(1 + len(self._hashers))]
        self._pieces = [mmap.mmap(-1, _PIECE) for _ in range(3)]  # mapped: aligned, as it must be
        self._converted = torch.empty(_PIECE, dtype=torch.uint8)
        self._busy: list[list[Future[Any]]] = [[] for _ in self._pieces]
        self._turn = 0
        self._filled = 0
        self._offset = 0

    def __enter__(self) -> TensorFile:
        self._file = _open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._append(
            memoryview(
                make_header((entry.key, entry.shape, entry.dtype) for entry in self._entries)
            )
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._send()
                for future in (future for busy in self._busy for future in busy):
                    future.result()
                os.fsync(self._file)
        finally:
            for thread in self._threads:
                thread.shutdown(wait=True)
            os.close(self._file)

    def add(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Write a tensor's content as `dtype`."""
        for part in tensor.reshape(-1).split(_PIECE // dtype.itemsize):
            # Not `part.to(dtype)`: fresh memory for each part left the heap five times as large.
            converted = self._converted[: part.numel() * dtype.itemsize]
            converted.view(dtype).copy_(part)
            self._append(memoryview(converted.numpy()))

    def manifest_entry(self) -> dict[str, Any]:
        """Return path, bytes and SHA-256; after the `with`."""
        return {
            "path": self.path.name,
            "bytes": self._offset,
            "digest": hashing.digest(self._hashers["sha256"], "sha256"),
        }

    def reads_back(self) -> bool:
        """Tell whether the file, read again, is what was written; after the `with`."""
        hasher = hashing.new()
        for piece in _read(self.path):
            hasher.update(piece)
        return hasher.hexdigest() == self._hashers[hashing.FAST].hexdigest()

    def _append(self, data: memoryview) -> None:
        while data:
            part = data[: _PIECE - self._filled]
            self._pieces[self._turn][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _PIECE:
                self._send()

    def _send(self) -> None:
        """Hand the piece to the threads, and wait until the next one is free again."""
        view = memoryview(self._pieces[self._turn])[: self._filled]
        writer, *hashers = self._threads
        self._busy[self._turn] = [
            writer.submit(_write, self._file, view, self._offset),
            *(
                thread.submit(hasher.update, view)
                for thread, hasher in zip(hashers, self._hashers.values(), strict=True)
            ),
        ]
        self._offset += self._filled
        self._turn = (self._turn + 1) % len(self._pieces)
        self._filled = 0
        for future in self._busy[self._turn]:
            future.result()


def not_as_written(path: Path) -> ArtifactError:
    """Return the error for a file that does not read back."""
    return ArtifactError(
        f"{path} does not read back as it was written",
        hint="check the disk (`dmesg`), then:",
        run=commands.as_typed(),
    )


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without direct access
            raise
        return os.open(path, flags, 0o666)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write a piece at an offset. An incomplete last block goes through the page cache."""
    if len(data) < _PIECE:
        _through_the_cache(descriptor)
    while data:
        try:
            written = os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_the_cache(descriptor):
                raise
            continue
        data = data[written:]
        offset = offset + written


def _through_the_cache(descriptor: int) -> bool:
    """Stop direct access; False when there was none."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def _read(path: Path) -> Iterator[memoryview]:
    """Yield a file's content in pieces, each valid until the next."""
    piece = memoryview(mmap.mmap(-1, _PIECE))
    offset = 0
    descriptor = _open(path, os.O_RDONLY)
    try:
        while True:
            try:
                count = os.preadv(descriptor, [piece], offset)
            except OSError as error:  # a file system that takes the flag and no such read
                if error.errno != errno.EINVAL or not _through_the_cache(descriptor):
                    raise
                continue
            if not count:
                return
            yield piece[:count]
            offset += count
            if offset % mmap.PAGESIZE:  # the end; anything that is left would be misaligned
                _through_the_cache(descriptor)
    finally:
        os.close(descriptor)
