"""Allocate host memory of an exact size, page-locked for copies that do not wait."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from lib.core import units

_ALIGNMENT = 512  # bytes


class NoHostMemoryError(Exception):
    """There is not enough host memory, or it cannot be page-locked."""


class HostMemory:
    """One memory mapping with a tensor for each name, with resident and optionally locked pages.

    torch's allocator of pinned memory would round each tensor up to a power of two (162 GiB instead
    of 85), and keep the memory until the process ends.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], locked: bool) -> None:
        """Allocate the memory; raise NoHostMemoryError if the system or the driver refuses."""
        starts = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            starts[name] = end
            end += units.ceil_div(shape.numel() * dtype.itemsize, _ALIGNMENT) * _ALIGNMENT
        try:
            self._pages = mmap.mmap(-1, max(end, 1))
        except OSError as error:
            raise NoHostMemoryError(f"the system refuses host memory: {error.strerror}") from error
        self.tensors = {name: self._tensor(starts[name], *shapes[name]) for name in shapes}
        for tensor in self.tensors.values():
            # Copies to resident pages are three times as fast. The driver would touch missing pages
            # in a single thread, and block other threads from mapping memory meanwhile.
            tensor.zero_()
        if locked:
            self._lock(end)

    def _lock(self, size: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        result = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(result) != 0:
            raise NoHostMemoryError(
                f"the driver cannot page-lock {units.memory(size)} of host "
                f"memory (CUDA error {int(result)})"
            )

    def _tensor(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory that begins at byte `start`; it has its own storage.

        DCP writes such a tensor without a copy.
        """
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=shape.numel(), offset=start).view(
            shape
        )
