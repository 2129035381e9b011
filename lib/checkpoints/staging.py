"""Copies of tensors in host memory, so that training goes on while they are made and written."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.checkpoints import state


class HostCopies:
    """Copies beside the next forward and backward pass, which only read what is copied.

    What comes before the tensors change waits for the copies: the optimizer's next step by itself,
    anything else (loading a checkpoint, say) by `wait`. The memory is kept: to allocate, pin and
    touch it again would cost as much as the copy. bytes: host memory that the copies take on this
    rank. waited: seconds that the optimizer's next step waited on the host for the last copies.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._on_cpu: Future[None] | None = None
        self._on_gpu: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.waited = 0.0

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer,
             ) -> dict[str, Tensor]:
        """Return the tensors as they are now, sharded in the same way; the last copies are gone.

        They are whole after `wait`. Buffers, which a forward pass may change, are copied at once.
        """
        if self._optimizer is not optimizer:
            optimizer.register_step_pre_hook(self._before_step)
            self._optimizer = optimizer
        taken: dict[str, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._buffers.get(name)
            if buffer is None:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[name] = buffer
            # Not `from_local`, which would move the copy back to the mesh's device.
            taken[name] = DTensor(buffer, tensor._spec, requires_grad=False) \
                if isinstance(tensor, DTensor) else buffer
            if name.startswith(state.BUFFER):
                buffer.copy_(local)
            else:
                pairs.append((buffer, local))
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
