"""Copy offloaded parameters to the device before their use, if a rank has all of them.

With several ranks per replica, FSDP2 (torch 2.11 to 2.13) copies the shards of a group on a stream
of its own while the previous group computes. With one rank there is nothing to gather. Then
prefetching does nothing: each copy waits for the compute stream, which waits for the copy in turn.
This module lets prefetching begin the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_PIECE = 1 << 26  # elements that are cast at once, in at most 256 MiB


def copy_ahead(model: nn.Module) -> None:
    """Copy the parameters of each FSDP group to the device when FSDP prefetches the group.

    model: sharded with an offload policy over one rank (per replica), with prefetching set. A
    prefetched group takes its size in compute precision on the device, plus 256 MiB.
    """
    copies = _Copies()
    for group in _groups(model):
        _CopiedGroup(group, copies)


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield each parameter group of FSDP once; several modules may share one."""
    seen = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # torch 2.11
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


class _Copies:
    """The stream on which all groups of a model are copied.

    stream: None until the first copy.
    """

    def __init__(self) -> None:
        self.stream: Any = None


class _CopiedGroup:
    """Replaces two methods of an FSDP parameter group, and copies between their calls.

    FSDP calls `unshard` when it prefetches a group, and `wait_for_unshard` when it uses the group.
    In between it keeps an all-gather result, which it drops if the group is not used. The copy, one
    tensor of all parameters, is the output in that result and is dropped with it.
    """

    def __init__(self, group: Any, copies: _Copies) -> None:
        self._group = group
        self._copies = copies
        self._copied: Any = None  # the event after the copy of this group
        self._unshard = group.unshard
        self._wait = group.wait_for_unshard
        group.unshard = self.unshard
        group.wait_for_unshard = self.wait_for_unshard

    def unshard(self, async_op: bool = False) -> None:
        """Begin to copy the group, unless it is on the device or being copied."""
        before = self._group._all_gather_result
        self._unshard(async_op)
        result = self._group._all_gather_result
        if result is not None and result is not before and self._is_plain():
            self._group._all_gather_result = result._replace(all_gather_output=self._copy())

    def wait_for_unshard(self) -> None:
        """Wait for the copy and pass it to FSDP in place of the shards in host memory."""
        group = self._group
        result = self._group._all_gather_result
        if result is None or not result.all_gather_output.numel():
            self._wait()
            return
        group.device_handle.current_stream().wait_event(self._copied)
        params = group.fsdp_params
        shards = [param._sharded_param_data for param in params]
        copies = result.all_gather_output.split([shard.numel() for shard in shards])
        for param, copy in zip(params, copies, strict=True):
            param._sharded_param_data = copy
        try:
            self._wait()
        finally:
            for param, shard in zip(params, shards, strict=True):
                param._sharded_param_data = shard
        used = group.device_handle.Event()
        used.record()
        # The memory belongs to the copy stream: its next copy may reuse it, and the allocator may
        # unmap it after that. FSDP has dropped its result; until here `copies` keeps the memory.
        self._copies.stream.wait_event(used)

    def _is_plain(self) -> bool:
        """Return whether the copy only has to cast the parameters, to a single dtype."""
        return len(self._dtypes()) == 1 and not any(
            hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            for param in self._group.fsdp_params
        )

    def _dtypes(self) -> set[torch.dtype]:
        return {param.param_dtype or param.orig_dtype for param in self._group.fsdp_params}

    @torch.no_grad()
    def _copy(self) -> torch.Tensor:
        """Begin to copy the group; return the copy in compute precision, one flat tensor."""
        group = self._group
        copies = self._copies
        shards = [param._sharded_param_data for param in group.fsdp_params]
        [dtype] = self._dtypes()
        if copies.stream is None:
            copies.stream = group.device_handle.Stream()
        with group.device_handle.stream(copies.stream):
            copy = torch.empty(
                sum(shard.numel() for shard in shards), dtype=dtype, device=group.device
            )
            parts = copy.split([shard.numel() for shard in shards])
            for part, shard in zip(parts, shards, strict=True):
                for to, piece in zip(part.split(_PIECE), shard.split(_PIECE), strict=True):
                    # Copy first: otherwise the host would cast.
                    to.copy_(
                        piece
                        if piece.dtype == dtype
                        else piece.to(group.device, non_blocking=True),
                        non_blocking=True,
                    )
            self._copied = group.device_handle.Event()
            self._copied.record()
        return copy
