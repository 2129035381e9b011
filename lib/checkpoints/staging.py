"""Copies of tensors in host memory, so that training goes on while they are made and written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.checkpoints import state
from lib.checkpoints.host_memory import HostMemory, NoHostMemoryError
from lib.core import units, workers
from lib.models.sharded import local_tensor

_USABLE = 0.9  # of the free host memory: the rest is for the file cache and the data's workers


class HostCopies:
    """Copies beside the next forward and backward pass, which only read what is copied.

    What comes before the tensors change waits for the copies: the optimizer's next step by itself,
    anything else (loading a checkpoint, say) by `wait`. The memory is kept: to allocate, lock and
    touch it again would cost as much as the copy. room: returns the bytes of host memory that this
    rank can still be given. waited: seconds that the optimizer's next step waited on the host for
    the last copies.
    """

    def __init__(self, room: Callable[[], float] = lambda: math.inf) -> None:
        self._room = room
        self._thread = workers.thread_pool(name="staging")
        self._memory: Future[HostMemory] | None = None
        self._on_cpu: Future[None] | None = None
        self._on_gpu: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.waited = 0.0

    @property
    def bytes(self) -> int:
        """Return the host memory that the copies take on this rank."""
        return sum(tensor.nbytes for tensor in self._memory.result().tensors.values())

    @property
    def are_prepared(self) -> bool:
        """Tell whether `prepare` was called."""
        return self._memory is not None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Begin to make room for copies of these tensors, in a thread: it takes seconds."""
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in local.items()}
        self._memory = self._thread.submit(
            self._allocate, shapes, sum(tensor.nbytes for tensor in local.values()),
            any(tensor.is_cuda for tensor in local.values()))

    def _allocate(self, shapes: dict[str, tuple[torch.Size, torch.dtype]], needed: int,
                  locked: bool) -> HostMemory:
        room = self._room()
        if needed > _USABLE * room:
            raise NoHostMemoryError(f"{units.memory(needed)} of host memory is needed on each "
                                    f"rank, and a rank can have {units.memory(_USABLE * room)}")
        return HostMemory(shapes, locked)

    def refusal(self) -> str:
        """Say why there is no room for the copies, nothing where there is; waits for `prepare`."""
        try:
            self._memory.result()
        except NoHostMemoryError as error:
            return str(error)
        return ""

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer,
             ) -> dict[str, Tensor]:
        """Return the tensors as they are now, sharded in the same way; the last copies are gone.

        They are whole after `wait`. Buffers, which a forward pass may change, are copied at once.
        Raises NoHostMemoryError where `refusal` says so.
        """
        if self._optimizer is not optimizer:
            optimizer.register_step_pre_hook(self._before_step)
            self._optimizer = optimizer
        if not self.are_prepared:
            self.prepare(tensors)
        copies = self._memory.result().tensors
        taken: dict[str, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            local, copy = local_tensor(tensor), copies[name]
            # Not `from_local`, which would move the copy back to the mesh's device.
            taken[name] = DTensor(copy, tensor._spec, requires_grad=False) \
                if isinstance(tensor, DTensor) else copy
            if name.startswith(state.BUFFER):
                copy.copy_(local)
            else:
                pairs.append((copy, local))
        self._begin(pairs)
        return taken

    def wait(self) -> None:
        """Return when the copies are whole."""
        if self._on_cpu is not None:
            self._on_cpu.result()
        if self._on_gpu is not None:
            self._on_gpu.synchronize()

    def _begin(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.waited = 0.0
        on_gpu = [pair for pair in pairs if pair[1].is_cuda]
        self._on_cpu = self._thread.submit(_copy, [p for p in pairs if not p[1].is_cuda])
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # the last step's changes
            with torch.cuda.stream(self._stream):
                _copy(on_gpu)
                self._on_gpu = self._stream.record_event()

    def _before_step(self, *_: Any) -> None:
        """Hold the optimizer's kernels back until the copies are whole; the host goes on."""
        if self._on_cpu is not None:
            began = time.monotonic()
            self._on_cpu.result()
            self.waited = time.monotonic() - began
        if self._on_gpu is not None:
            torch.cuda.current_stream().wait_event(self._on_gpu)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)
