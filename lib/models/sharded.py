"""Tells which part of a parameter a rank holds, and what sharding hides of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Private, but the only place that knows every placement (uneven, strided, several mesh dimensions);
# torch's own checkpoint code calls it. The same signature in torch 2.11 to 2.13.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel


class Placement(NamedTuple):
    """Says where a model will compute.

    shard_size: ranks per replica. offload: shards lie in host memory. device: `cuda` or `cpu`.
    """

    shard_size: int = 1
    offload: bool = False
    device: str = "cpu"


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of the full tensor that this rank holds, one slice per dimension.

    tensor: a DTensor on a mesh of any number of dimensions, or a plain tensor (all of it). A rank
    that holds nothing gets an empty slice.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size)
                 for offset, size in zip(offsets, sizes, strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor that shares its memory."""
    tensor = plain(tensor)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_gathered_in_8_bits(tensor: Tensor) -> bool:
    """Tell whether FSDP gathers a parameter in 8 bits, see float8.py."""
    return isinstance(tensor, DTensor) and hasattr(tensor._local_tensor, "fsdp_pre_all_gather")


def plain(tensor: Tensor) -> Tensor:
    """Return the masters of what FSDP gathers in 8 bits, sharing its memory; all else as it is.

    torchao gives such a shard a class of its own, which no file should hold.
    """
    if is_gathered_in_8_bits(tensor):
        return DTensor(tensor._local_tensor._tensor, tensor._spec, requires_grad=False)
    return tensor


def tie_again(model: PreTrainedModel) -> None:
    """Make tied weights one parameter again after `to_empty`, where that is needed.

    `to_empty` keeps a shared DTensor shared and gives a shared plain parameter one memory per name.
    Nothing is done to the former: `tie_weights` also pads a head's bias, which would put it outside
    the memory that FSDP knows.
    """
    if any(model.get_parameter(name) is not model.get_parameter(source)
           for name, source in model.all_tied_weights_keys.items()):
        model.tie_weights()


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's own class, which `fully_shard` puts behind one of its making."""
    line = type(module).__mro__
    return line[line.index(FSDPModule) + 1] if FSDPModule in line else line[0]


@contextlib.contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give all modules their own class back for the while.

    transformers looks up key conversions and initialisation rules by the name of the class, and
    finds none for FSDPGPTNeoXForCausalLM (5.17 to 5.23).
    """
    sharded = [(module, type(module)) for module in model.modules()
               if isinstance(module, FSDPModule)]
    try:
        for module, _ in sharded:
            module.__class__ = own_class(module)
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind
