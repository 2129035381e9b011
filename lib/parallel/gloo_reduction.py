"""Sum gradients between processors with half of the traffic of gloo's own reduce-scatter.

gloo (torch 2.11 to 2.13) copies the input of a reduce-scatter, reduces all of it on every rank, and
copies the part of this rank out of the result. Here each rank sends to every other rank only the
part that the other one keeps, and adds up what it receives, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lib.parallel.fsdp_groups import list_groups


def exchange_parts(model: nn.Module) -> None:
    """Let each FSDP group of several ranks reduce its gradients by an exchange of parts.

    model: sharded on processors, with gradients that are summed and not averaged.
    """
    for module in model.modules():
        sizes = [group.mesh_info.shard_mesh_size for group in list_groups(module)]
        # FSDP refuses its hook for a module with several groups.
        if isinstance(module, FSDPModule) and len(sizes) == 1 and sizes[0] > 1:
            module.set_custom_reduce_scatter(_Exchange())


class _Exchange:
    """Has the methods of FSDP's `ReduceScatter`."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write the sum over ranks of one part each.

        output_tensor: [n]. input_tensor: [ranks × n], part r for rank r.
        """
        assert op == dist.ReduceOp.SUM and not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)
