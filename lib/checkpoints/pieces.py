"""The tensors of a checkpoint, read one at a time straight from its files into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from lib.checkpoints.storage import StrictReader
from lib.models.tensors import read_into

Described = tuple[tuple[int, ...], torch.dtype]


class PieceReader:
    """Reads full tensors out of the shards that ranks wrote; verify the digests before.

    `dcp.load` would hold a shard, its copy in the tensor and what unpickling needs at once. Here
    each shard goes from the file into its place, in memory that is used over and over.
    described: shape and dtype by name. reads_ahead: what was read is valid until the next but one
    call of `read`, at the cost of memory for two; else until the next.
    """

    def __init__(self, directory: Path, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead
        metadata = StrictReader(directory).read_metadata()
        self._tensors, self._places = metadata.state_dict_metadata, metadata.storage_data
        self.described: dict[str, Described] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._tensors.items()}
        # Opened now, so that a run that goes on may delete the checkpoint while it is read.
        names = {place.relative_path for place in self._places.values()}
        self._files = {name: (directory / name).open("rb", buffering=0) for name in sorted(names)}
        self._fake = FakeTensorMode()
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(1 + reads_ahead)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Return full tensors; ArtifactError when a file is cut short."""
        spans = [_aligned(torch.Size(shape).numel() * dtype.itemsize)
                 for shape, dtype in (self.described[name] for name in names)]
        memory = self._memory.pop(0)
        if sum(spans) > len(memory):
            del memory  # before the larger one is there
            memory = torch.empty(sum(spans), dtype=torch.uint8)
        self._memory.append(memory)
        return [self._read(name, part) for name, part
                in zip(names, memory[:sum(spans)].split(spans), strict=True)]

    def _read(self, name: str, memory: Tensor) -> Tensor:
        shape, dtype = self.described[name]
        full = memory[:torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for chunk in self._tensors[name].chunks:
            part = full[tuple(slice(first, first + size) for first, size
                              in zip(chunk.offsets, chunk.sizes, strict=True))]
            if part.numel():
                self._fill(part, self._places[MetadataIndex(name, chunk.offsets)])
        return full

    def _fill(self, part: Tensor, place: _StorageInfo) -> None:
        """Copy a shard into its part of a tensor, without a detour where both are contiguous."""
        file = self._files[place.relative_path]
        # Reads only the description: https://pytorch.org/tutorials/prototype/gpu_direct_storage
        with self._fake:
            saved = torch.load(_create_file_view(file, place.offset, place.length),
                               map_location="cpu", weights_only=True)
        storage = saved.untyped_storage()
        direct = part.is_contiguous() and saved.is_contiguous() and \
            storage.nbytes() == part.nbytes
        target = part if direct else torch.empty(storage.nbytes() // saved.itemsize,
                                                 dtype=saved.dtype)
        read_into(target, file.fileno(), place.offset + storage._checkpoint_offset, Path(file.name))
        if not direct:
            part.copy_(target.as_strided(saved.shape, saved.stride(), saved.storage_offset()))


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
