"""Copy tensors to host memory, so that training continues while a checkpoint is written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lib.checkpoints import contents
from lib.core import units, workers
from lib.models.sharded import local_tensor
from lib.parallel.host_memory import HostMemory, NoHostMemoryError

_USABLE = 0.9  # of the free host memory; the rest is for the page cache and the data workers


class HostCopies:
    """Copies tensors during the next forward and backward pass, which only read them.

    The optimizer's next step waits for the copies by itself. Anything else that changes the tensors
    (loading a checkpoint, for example) must call `wait` first. The memory is kept for the next
    copies, because allocating, locking and touching it again would cost as much as the copy.
    free_memory: returns the bytes of host memory that this rank can still use. waited: seconds that
    the last optimizer step waited on the host.
    """

    def __init__(
        self, optimizer: Optimizer, free_memory: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._free_memory = free_memory
        self._optimizer: Optimizer | None = optimizer  # None once its hook is registered
        self._thread = workers.thread_pool(name="staging")
        self._memory: Future[HostMemory] | None = None
        self._on_cpu: Future[None] | None = None
        self._on_gpu: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.waited = 0.0

    @property
    def bytes(self) -> int:
        """Return the bytes of host memory that the copies use on this rank."""
        return sum(tensor.nbytes for tensor in self._get_memory().tensors.values())

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Start to allocate memory for copies of these tensors, in a thread: it takes seconds."""
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}
        self._memory = self._thread.submit(
            self._allocate,
            shapes,
            sum(tensor.nbytes for tensor in local.values()),
            any(tensor.is_cuda for tensor in local.values()),
        )

    def _allocate(
        self, shapes: dict[str, tuple[torch.Size, torch.dtype]], needed: int, locked: bool
    ) -> HostMemory:
        available = _USABLE * self._free_memory()
        if needed > available:
            raise NoHostMemoryError(
                f"each rank needs {units.memory(needed)} of host memory, and only "
                f"{units.memory(available)} is available"
            )
        return HostMemory(shapes, locked)

    def describe_refusal(self) -> str:
        """Return why there is not enough memory for the copies, or ""; waits for `prepare`."""
        try:
            self._get_memory()
        except NoHostMemoryError as error:
            return str(error)
        return ""

    def _get_memory(self) -> HostMemory:
        assert self._memory is not None, "prepare was called"
        return self._memory.result()

    @torch.no_grad()
    def copy_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy the tensors and return the copies, which overwrite the previous ones.

        The copies are sharded like the tensors, and complete after `wait`. Buffers, which a forward
        pass may change, are copied immediately. Raises NoHostMemoryError if there is not enough
        host memory.
        """
        if self._memory is None:
            self.prepare(tensors)
        if self._optimizer is not None:  # not earlier: the hook would keep rejected memory alive
            self._optimizer.register_step_pre_hook(self._before_step)
            self._optimizer = None
        copies = self._get_memory().tensors
        result: dict[str, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            local = local_tensor(tensor)
            copy = copies[name]
            # `from_local` would move the copy back to the mesh's device.
            result[name] = (
                DTensor(copy, tensor._spec, requires_grad=False)
                if isinstance(tensor, DTensor)
                else copy
            )
            if name.startswith(contents.BUFFER):
                copy.copy_(local)
            else:
                pairs.append((copy, local))
        self._begin(pairs)
        return result

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._on_cpu is not None:
            self._on_cpu.result()
        if self._on_gpu is not None:
            self._on_gpu.synchronize()

    def _begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.waited = 0.0
        on_gpu = [pair for pair in pairs if pair[1].is_cuda]
        self._on_cpu = self._thread.submit(_copy_tensors, [p for p in pairs if not p[1].is_cuda])
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # the last step's changes
            with torch.cuda.stream(self._stream):
                _copy_tensors(on_gpu)
                self._on_gpu = self._stream.record_event()

    def _before_step(self, *_: Any) -> None:
        """Delay the optimizer's kernels until the copies are complete; the host continues."""
        if self._on_cpu is not None:
            began = time.monotonic()
            self._on_cpu.result()
            self.waited = time.monotonic() - began
        if self._on_gpu is not None:
            torch.cuda.current_stream().wait_event(self._on_gpu)


def _copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)
