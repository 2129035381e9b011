"""Copies of tensors in host memory, so that training goes on while they are written."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class HostCopies:
    """Keeps its buffers: to allocate, pin and touch them again would cost as much as the copy.

    bytes: host memory that the copies take on this rank.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors as they are now, sharded in the same way; the last copies are gone."""
        taken, on_gpu = {}, False
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            on_gpu |= local.is_cuda
            buffer = self._buffers.get(name)
            if buffer is None:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(local, non_blocking=True)
            # Not `from_local`, which would move the copy back to the mesh's device.
            taken[name] = DTensor(buffer, tensor._spec, requires_grad=False) \
                if isinstance(tensor, DTensor) else buffer
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return taken
