"""Leave out copies that FSDP2 makes even where one rank holds all of a parameter.

With one rank per replica, FSDP2 (torch 2.11 to 2.13) gathers and reduces nothing, but it keeps the
buffers of a collective: it casts each weight and then copies the result, and it copies the flat
gradient of a group into a second buffer. Here the cast writes where FSDP wants the weight, and one
buffer is both the input and the output of a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lib.parallel.fsdp_groups import find_groups, list_groups


def cast_into_place(model: nn.Module) -> None:
    """Let each FSDP group on one rank cast its weights without a copy in between.

    model: sharded, without an offload policy. Groups on several ranks stay as they are.
    """
    for group in find_groups(model):
        if _is_alone(group):
            _CastGroup(group)


def share_buffers(model: nn.Module) -> None:
    """Let each FSDP group on one rank reduce its gradients within one buffer."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(map(_is_alone, list_groups(module))):
            module.set_custom_reduce_scatter(_SharedBuffer())


def _is_alone(group: Any) -> bool:
    return bool(group.mesh_info.shard_mesh_size == 1)


class _CastGroup:
    """Replaces the method of an FSDP parameter group that makes its weights available.

    With one rank, FSDP casts a shard to its `param_dtype` and copies the result to an output that
    it creates in the same dtype. If the output exists and there is no `param_dtype`, the copy
    itself casts.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._wait = group.wait_for_unshard
        group.wait_for_unshard = self.wait_for_unshard

    def wait_for_unshard(self) -> None:
        """Make the weights of the group available in the compute dtype."""
        cast = [
            param
            for param in self._group.fsdp_params
            if param.param_dtype and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
        ]
        dtypes = [param.param_dtype for param in cast]
        for param, dtype in zip(cast, dtypes, strict=True):
            numel = param._sharded_param_data.numel()
            param.init_all_gather_outputs([numel], [dtype], 1, self._group.device)
            param.param_dtype = None
        try:
            self._wait()
        finally:
            for param, dtype in zip(cast, dtypes, strict=True):
                param.param_dtype = dtype


class _SharedBuffer:
    """Gives FSDP the input of a reduction as its output as well, so that no copy is needed.

    FSDP allocates the input, then the output. With one rank it copies one to the other; a copy of a
    tensor to itself does nothing.

    FSDP allocates the output on the stream of its reductions, whose later work (the copy to host
    memory, sums over micro-batches) may still read it when the last reference is gone. The input
    comes from the stream that computes, so the allocator is told of the other one: otherwise the
    next block of the backward pass could overwrite a gradient that is still being read.
    """

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer for an input, and the same one for the output that follows it."""
        buffer = self._input
        self._input = None
        if buffer is None or (buffer.numel(), buffer.dtype) != (math.prod(size), dtype):
            buffer = self._input = torch.empty(size, dtype=dtype, device=device)
        elif buffer.is_cuda and torch.cuda.is_initialized():  # not a fake tensor of an estimate
            buffer.record_stream(torch.cuda.current_stream(device))
        return buffer

    def __call__(self, **arguments: Any) -> None:
        """Raise AssertionError: FSDP communicates only if there are other ranks."""
        raise AssertionError("a reduction over one rank needs no communication")
