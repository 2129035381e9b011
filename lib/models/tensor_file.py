"""Write tensors in the safetensors format, to a file or to memory.

A file is written in pieces; each one is hashed and written while the next is filled. If the file
system allows it, the pieces bypass the page cache (O_DIRECT). That takes a tenth of the
CPU time of a buffered write, does not evict the files that a training run reads, and makes it
possible to read the file back from the disk itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lib.core import commands, hashing
from lib.core.errors import ArtifactError
from lib.models.tensors import DTYPES

_PIECE = 8 << 20  # bytes
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its key, shape and dtype in the file."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def make_header(
    tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], with_format: bool = True
) -> bytes:
    """Return the first bytes of a file with tensors (name, shape, dtype) in this order.

    with_format: include the metadata `format: pt`, which transformers requires.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}} if with_format else {}
    offset = 0
    for key, shape, dtype in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        content[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def encode_tensors(tensors: Mapping[str, Tensor], with_format: bool = True) -> bytes:
    """Return the content of a file with these tensors, with a single copy of them in memory.

    with_format: see `make_header`.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = make_header(
        ((name, tensor.shape, tensor.dtype) for name, tensor in on_cpu.items()), with_format
    )
    return b"".join(
        [header, *(tensor.flatten().view(torch.uint8).numpy() for tensor in on_cpu.values())]
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors on the CPU to a file, in their order, and return its manifest entry."""
    entries = [Entry(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    with TensorFile(path, entries) as file:
        for tensor in tensors.values():
            file.add(tensor.detach(), tensor.dtype)
    return file.manifest_entry()


class TensorFile:
    """Writes one safetensors file, which is durable after a `with` block without an error.

    While the caller fills a piece, threads hash and write the previous ones.
    """

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self._entries = entries
        self._hashers = {kind: hashing.new_hasher(kind) for kind in {"sha256", hashing.FAST}}
        self._threads = [ThreadPoolExecutor(1) for _ in range(1 + len(self._hashers))]
        # Mapped memory has the alignment that O_DIRECT needs.
        self._pieces = [mmap.mmap(-1, _PIECE) for _ in range(3)]
        self._converted = torch.empty(_PIECE, dtype=torch.uint8)
        self._busy: list[list[Future[Any]]] = [[] for _ in self._pieces]
        self._current = 0
        self._filled = 0
        self._offset = 0

    def __enter__(self) -> TensorFile:
        self._file = _open_direct(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
            # `part.to(dtype)` would allocate for each part, which made the heap five times as
            # large.
            converted = self._converted[: part.numel() * dtype.itemsize]
            converted.view(dtype).copy_(part)
            self._append(memoryview(converted.numpy()))

    def manifest_entry(self) -> dict[str, Any]:
        """Return the manifest entry of the file, after the `with` block."""
        return {
            "path": self.path.name,
            "bytes": self._offset,
            "digest": hashing.format_digest(self._hashers["sha256"], "sha256"),
        }

    def reads_back(self) -> bool:
        """Return whether the file reads back as it was written, after the `with` block."""
        hasher = hashing.new_hasher()
        for piece in _read_pieces(self.path):
            hasher.update(piece)
        return hasher.hexdigest() == self._hashers[hashing.FAST].hexdigest()

    def _append(self, data: memoryview) -> None:
        while data:
            part = data[: _PIECE - self._filled]
            self._pieces[self._current][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _PIECE:
                self._send()

    def _send(self) -> None:
        """Hand the piece to the threads, and wait until the next buffer is free."""
        view = memoryview(self._pieces[self._current])[: self._filled]
        writer, *hashers = self._threads
        self._busy[self._current] = [
            writer.submit(_write_piece, self._file, view, self._offset),
            *(
                thread.submit(hasher.update, view)
                for thread, hasher in zip(hashers, self._hashers.values(), strict=True)
            ),
        ]
        self._offset += self._filled
        self._current = (self._current + 1) % len(self._pieces)
        self._filled = 0
        for future in self._busy[self._current]:
            future.result()


def make_read_back_error(path: Path) -> ArtifactError:
    """Return the error for a file that does not read back as it was written."""
    return ArtifactError(
        f"{path} does not read back as it was written",
        hint="check the disk (`dmesg`), then:",
        run=commands.as_typed(),
    )


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system has no direct I/O
            raise
        return os.open(path, flags, 0o666)


def _write_piece(descriptor: int, data: memoryview, offset: int) -> None:
    """Write a piece at an offset; a short last piece goes through the page cache."""
    if len(data) < _PIECE:
        _disable_direct_io(descriptor)
    while data:
        try:
            written = os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _disable_direct_io(descriptor):
                raise
            continue
        data = data[written:]
        offset = offset + written


def _disable_direct_io(descriptor: int) -> bool:
    """Switch direct I/O off; return False if it was off already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def _read_pieces(path: Path) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each valid until the next one."""
    piece = memoryview(mmap.mmap(-1, _PIECE))
    offset = 0
    descriptor = _open_direct(path, os.O_RDONLY)
    try:
        while True:
            try:
                count = os.preadv(descriptor, [piece], offset)
            except OSError as error:  # this file system accepts the flag but not the read
                if error.errno != errno.EINVAL or not _disable_direct_io(descriptor):
                    raise
                continue
            if not count:
                return
            yield piece[:count]
            offset += count
            if offset % mmap.PAGESIZE:  # the end of the file; a further read would be misaligned
                _disable_direct_io(descriptor)
    finally:
        os.close(descriptor)
