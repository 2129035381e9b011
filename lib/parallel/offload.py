"""Copy offloaded parameters to the device before their use, if each rank is a replica.

With several ranks per replica, FSDP2 (torch 2.11 to 2.13) copies the shards of a group on a
separate stream while the previous group computes. With one rank there is nothing to gather, and
prefetching does nothing: the copy waits for the compute stream, which then waits for the copy. This
module lets prefetching begin the copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lib.parallel.fsdp_groups import find_groups

_CHUNK = 1 << 26  # elements that are cast at a time, in at most 256 MiB


def copy_ahead(model: nn.Module) -> None:
    """Copy the parameters of each FSDP group to the device when FSDP prefetches the group.

    model: sharded with an offload policy over one rank (per replica), with prefetching set. A
    prefetched group needs its size in the compute dtype on the device, plus 256 MiB.
    """
    copies = _Copies()
    for group in find_groups(model):
        _CopiedGroup(group, copies)


class _Copies:
    """The stream on which all groups of a model are copied, None until the first copy."""

    def __init__(self) -> None:
        self.stream: Any = None


class _CopiedGroup:
    """Replaces two methods of an FSDP parameter group, and copies between their calls.

    FSDP calls `unshard` when it prefetches a group, and `wait_for_unshard` when it uses the group.
    In between it keeps an all-gather result, which it drops if the group is not used. This class
    replaces the output in that result by the copy, one tensor with all parameters, so FSDP drops
    the copy too.
    """

    def __init__(self, group: Any, copies: _Copies) -> None:
        self._group = group
        self._copies = copies
        self._copy_event: Any = None  # recorded after the copy of this group
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
        group.device_handle.current_stream().wait_event(self._copy_event)
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
        use_event = group.device_handle.Event()
        use_event.record()
        # The allocator assigns the memory to the copy stream, whose next copy may reuse it. So that
        # stream waits until the parameters were cast. FSDP has dropped its result; up to this point
        # `copies` keeps the memory.
        self._copies.stream.wait_event(use_event)

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
        """Begin to copy the group; return the copy in the compute dtype, as one flat tensor."""
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
                for target, chunk in zip(part.split(_CHUNK), shard.split(_CHUNK), strict=True):
                    # Copy first: otherwise the host would cast.
                    target.copy_(
                        chunk
                        if chunk.dtype == dtype
                        else chunk.to(group.device, non_blocking=True),
                        non_blocking=True,
                    )
            self._copy_event = group.device_handle.Event()
            self._copy_event.record()
        return copy
