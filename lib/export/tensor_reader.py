"""Read full tensors from the sharded files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lib.checkpoints.storage import ShardFile, StrictReader
from lib.core import units


class FullTensorReader:
    """Reads full tensors from the shards of all ranks, whose digests the caller has verified.

    `dcp.load` would hold a shard, its copy in the full tensor and the buffers of unpickling in
    memory at the same time. This class reads each shard directly into the full tensor, in reused
    memory. described: shape and dtype by name. reads_ahead: if true, the tensors of one `read` stay
    valid during the next `read`, which needs memory for two groups; if false, only until then.
    """

    def __init__(self, directory: Path, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead
        metadata = StrictReader(directory).read_metadata()
        self._tensors = metadata.state_dict_metadata
        self._places = metadata.storage_data
        self.described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._tensors.items()
        }
        # All files are opened now, so that a running training may delete the checkpoint meanwhile.
        names = {place.relative_path for place in self._places.values()}
        self._files = {name: ShardFile(directory / name) for name in sorted(names)}
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(1 + reads_ahead)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Return full tensors; raise ArtifactError if a file is truncated."""
        spans = [
            _aligned(torch.Size(shape).numel() * dtype.itemsize)
            for shape, dtype in (self.described[name] for name in names)
        ]
        memory = self._memory.pop(0)
        if sum(spans) > len(memory):
            del memory  # before the larger one is allocated
            memory = torch.empty(sum(spans), dtype=torch.uint8)
        self._memory.append(memory)
        return [
            self._read(name, part)
            for name, part in zip(names, memory[: sum(spans)].split(spans), strict=True)
        ]

    def _read(self, name: str, memory: Tensor) -> Tensor:
        shape, dtype = self.described[name]
        full = memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for chunk in self._tensors[name].chunks:
            part = full[
                tuple(
                    slice(first, first + size)
                    for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
                )
            ]
            if part.numel():
                place = self._places[MetadataIndex(name, chunk.offsets)]
                self._files[place.relative_path].read(place, part, [0] * part.dim())
        return full


def _aligned(size: int) -> int:
    return units.ceil_div(size, 64) * 64
