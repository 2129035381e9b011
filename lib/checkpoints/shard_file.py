"""A file of shards as DCP writes it, read straight into the tensors they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from lib.models.tensors import read_into


class ShardFile:
    """Reads shards without the detour over a copy of each; verify the file's digest before."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self._fake = FakeTensorMode()
        self._described: dict[bytes, Tensor] = {}

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, place: _StorageInfo, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill a tensor with the part of a shard that begins at `offsets` and has its sizes.

        Raises ArtifactError when the file is cut short.
        """
        saved, begin = self._describe(place)
        rows = saved.is_contiguous() and saved.shape[1:] == target.shape[1:]
        if rows and target.is_cpu and target.is_contiguous() and target.dtype == saved.dtype:
            first = saved.storage_offset() + (offsets[0] * saved.stride(0) if saved.dim() else 0)
            read_into(target, self._file.fileno(), begin + first * saved.itemsize, self._path)
            return
        whole = torch.empty(saved.untyped_storage().nbytes() // saved.itemsize, dtype=saved.dtype)
        read_into(whole, self._file.fileno(), begin, self._path)
        part = whole.as_strided(saved.shape, saved.stride(), saved.storage_offset())
        for dimension, (offset, size) in enumerate(zip(offsets, target.shape, strict=True)):
            part = part.narrow(dimension, offset, size)
        target.copy_(part)

    def _describe(self, place: _StorageInfo) -> tuple[Tensor, int]:
        """Return a shard without its content, and the byte at which that begins."""
        archive = torch._C.PyTorchFileReader(
            _create_file_view(self._file, place.offset, place.length))
        description = archive.get_record("data.pkl")
        if description not in self._described:  # most shards are like others: a load takes 1 ms
            with self._fake:
                self._described[description] = torch.load(
                    _create_file_view(self._file, place.offset, place.length),
                    map_location="cpu", weights_only=True)
        return self._described[description], place.offset + archive.get_record_offset("data/0")
