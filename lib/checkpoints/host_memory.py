"""Host memory for copies of tensors: exactly their bytes, page-locked where they are on a GPU."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from lib.core import units

_ALIGNED = 512  # bytes; what a copy begins at


class NoHostMemoryError(Exception):
    """There is not enough host memory, or it cannot be page-locked; says which."""


class HostMemory:
    """One mapping with a tensor for each name, all of its pages there and, if asked, locked.

    torch's allocator of pinned memory rounds each tensor up to a power of two: 162 GiB for 85. It
    stays until the process ends.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], locked: bool) -> None:
        """Raise NoHostMemoryError where the system or the driver refuses."""
        starts, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            starts[name] = end
            end += -(-shape.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
        try:
            self._pages = mmap.mmap(-1, max(end, 1))
        except OSError as error:
            raise NoHostMemoryError(f"host memory is refused: {error.strerror}") from error
        self.tensors = {name: self._tensor(starts[name], *shapes[name]) for name in shapes}
        for tensor in self.tensors.values():
            # A page that is there is copied to at three times the speed. The driver would make
            # those that are not by one thread, and keep others from mapping memory meanwhile.
            tensor.zero_()
        if locked:
            self._lock(end)

    def _lock(self, size: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        result = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(result) != 0:
            raise NoHostMemoryError(f"the driver does not page-lock {units.memory(size)} of host "
                                    f"memory (CUDA error {int(result)})")

    def _tensor(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a part as a tensor with a storage of its own, which DCP writes as it stands."""
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._pages, dtype=dtype, count=shape.numel(), offset=start
                                ).view(shape)
