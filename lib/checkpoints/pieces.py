"""The tensors of a checkpoint, read one at a time straight from its files into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lib.checkpoints.shard_file import ShardFile
from lib.checkpoints.storage import StrictReader

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
        self._files = {name: ShardFile(directory / name) for name in sorted(names)}
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
                place = self._places[MetadataIndex(name, chunk.offsets)]
                self._files[place.relative_path].read(place, part, [0] * part.dim())
        return full


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
