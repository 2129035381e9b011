"""Keep the inputs of recomputed blocks in host memory between their forward and backward passes.

With full activation checkpointing, a step keeps only the input of each block, its hidden states.
For long sequences these are most of the memory: layers × tokens × features × 2 bytes. A stream of
its own copies them to the host while the block computes, and back one block ahead of the backward
pass. The copies are exact, so the results are the same to the bit.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.core.errors import UsageError
from lib.parallel.host_memory import HostMemory, NoHostMemoryError


def make_activation_offload(option: bool, device: torch.device) -> ActivationOffload | None:
    """Return what --activation-offload asks for; None if it is off, or the device is the host."""
    return ActivationOffload(device) if option and device.type == "cuda" else None


class ActivationOffload:
    """Copies the hidden states that checkpointed blocks keep to the host, and back in time.

    At any time the device contains the input of the block that computes, and that of one neighbour.
    The host memory is used again in later steps, because locking it takes seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = torch.get_device_module(device)
        self._copy_stream: Any = None  # None until the first copy
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._last: _HostCopy | None = None  # of the block that came last in this forward pass

    def wrap(self, forward: Callable[..., Any], is_first: bool) -> Callable[..., Any]:
        """Return a forward whose saved input, its first positional argument, moves to the host.

        forward: of a block with full activation checkpointing, compiled or not. is_first: the block
        is the first one of a forward pass. Do not wrap the last block, since the backward pass
        begins with it.
        """

        def forward_with_offload(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            call = _BlockCall(self, arguments[0], is_first)
            try:
                with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                    return forward(*arguments, **named)
            finally:
                call.end()

        return forward_with_offload

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return new host memory; raise UsageError if there is not enough."""
        try:
            memory = HostMemory({"": (shape, dtype)}, locked=self._device.type == "cuda")
        except NoHostMemoryError as error:
            raise UsageError(
                f"--activation-offload on: {error}",
                hint="a smaller --batch-size, or more host memory for the job",
            ) from error
        return memory.tensors[""]

    def keep(self, hidden: Tensor, is_first: bool) -> _HostCopy:
        """Begin to copy the input of a block to the host; release that of the block before it."""
        before = self._last
        if before is not None:
            before.release()
        memory = self.take_memory(hidden)
        self._last = _HostCopy(self, hidden.detach(), memory, None if is_first else before)
        return self._last

    def end_forward(self) -> None:
        """Forget the last block of the forward pass, since the backward pass has begun."""
        self._last = None

    def take_memory(self, like: Tensor) -> Tensor:
        """Return host memory with the shape and dtype of a tensor."""
        free = self._free[like.shape, like.dtype]
        return free.pop() if free else self.allocate(like.shape, like.dtype)

    def give_back(self, memory: Tensor) -> None:
        """Accept host memory that may be overwritten. A copy from it may still have to run."""
        self._free[memory.shape, memory.dtype].append(memory)

    def copy_to_device(self, memory: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy host memory to the device; return the copy, and the event of its end."""
        # Allocated for the stream that computes: `copy` waits until its earlier use has ended.
        tensor = torch.empty(memory.shape, dtype=memory.dtype, device=self._device)
        return tensor, self.copy(tensor, memory)

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begin to copy a tensor once the work so far is done; return the event of its end.

        All copies use the same stream, so they run in the order of their calls.
        """
        if self._copy_stream is None:
            self._copy_stream = self._streams.Stream()
        self._copy_stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            return self._copy_stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Delay the kernels of the current stream until a copy has ended; the host continues."""
        self._streams.current_stream().wait_event(event)


class _BlockCall:
    """Provides the hooks for the tensors that one call of a block saves for its backward pass.

    An uncompiled block saves its arguments, a compiled one also its gathered weights. Only the
    hidden states move to the host.
    """

    def __init__(self, offload: ActivationOffload, hidden: Tensor, is_first: bool) -> None:
        self._offload = offload
        self._hidden: Tensor | None = hidden  # None after the call
        self._is_first = is_first
        self._copy: _HostCopy | None = None

    def pack(self, tensor: Tensor) -> Tensor | _HostCopy:
        """Return what autograd keeps in place of a tensor."""
        if self._hidden is None or not _is_same(tensor, self._hidden):
            return tensor
        if self._copy is None:
            self._copy = self._offload.keep(self._hidden, self._is_first)
        return self._copy

    def unpack(self, packed: Tensor | _HostCopy) -> Tensor:
        """Return the tensor for which `pack` returned this."""
        if isinstance(packed, Tensor):
            return packed
        # A compiled block is rehearsed, forward and backward, within its first call.
        return packed.fetch() if self._hidden is None else self._hidden

    def end(self) -> None:
        """Drop the tensors of the call, since autograd keeps the hooks."""
        self._hidden = None
        self._copy = None


class _HostCopy:
    """The input of a block in host memory, and also on the device at the beginning and the end.

    The memory on the device belongs to the stream that computes. Before it is freed, that stream
    waits for the copy that uses it.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        hidden: Tensor,
        memory: Tensor,
        before: _HostCopy | None,
    ) -> None:
        self._offload = offload
        self._memory = memory
        self._before = None if before is None else weakref.ref(before)
        self._on_device: Tensor | None = hidden  # None while only the host contains it
        self._copied = offload.copy(memory, hidden)  # the event of the last copy

    def release(self) -> None:
        """Free the memory on the device once the copy has ended."""
        if self._on_device is not None:
            self._offload.wait_for(self._copied)
            self._on_device = None

    def prefetch(self) -> None:
        """Begin to copy the tensor back to the device, unless it is there."""
        if self._on_device is None:
            self._on_device, self._copied = self._offload.copy_to_device(self._memory)

    def fetch(self) -> Tensor:
        """Return the tensor on the device, and begin to copy that of the block before it."""
        self._offload.end_forward()
        self.prefetch()
        tensor = self._on_device
        assert tensor is not None
        self.release()
        if self._before is not None and (before := self._before()) is not None:
            before.prefetch()
        return tensor

    def __del__(self) -> None:
        self.release()
        self._offload.give_back(self._memory)


def _is_same(tensor: Tensor, hidden: Tensor) -> bool:
    """Return whether a saved tensor is the hidden states, or an alias of the same shape."""
    return (
        tensor.untyped_storage() is hidden.untyped_storage()
        and tensor.storage_offset() == hidden.storage_offset()
        and tensor.shape == hidden.shape
        and tensor.dtype == hidden.dtype
        and tensor.is_contiguous()
        and hidden.is_contiguous()
    )
