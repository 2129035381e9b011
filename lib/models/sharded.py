"""Tells which part of a parameter a rank holds, and what sharding hides of a module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Private, but the only place that knows every placement (uneven, strided, several mesh dimensions);
# torch's own checkpoint code calls it. The same signature in torch 2.11 to 2.13.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from lib.core import units

ROWS = 1  # the dimension of [experts, rows, columns] that padding makes longer
_REAL_ROWS = "real_rows"  # attribute of a padded parameter


class Placement(NamedTuple):
    """Says where a model will compute.

    shard_size: ranks per replica. offload: shards lie in host memory. device: `cuda` or `cpu`.
    """

    shard_size: int = 1
    offload: bool = False
    device: str = "cpu"


class Padded:
    """Marks modules with parameters that have unused rows, see lib/parallel/placement.py.

    rows: those of each padded parameter without padding.
    """

    rows: Mapping[str, int]


def mark_padded(model: nn.Module) -> None:
    """Tell padded parameters, which have just been given memory, how many of their rows are real.

    The padding is zero, and stays so: it has no gradient.
    """
    for module in model.modules():
        for name, rows in module.rows.items() if isinstance(module, Padded) else ():
            parameter = module._parameters[name]
            setattr(parameter, _REAL_ROWS, rows)
            whole = local_tensor(parameter, padded=True)
            real = local_tensor(parameter)
            whole.narrow(ROWS, real.shape[ROWS], whole.shape[ROWS] - real.shape[ROWS]).zero_()


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of the full tensor that this rank holds, one slice per dimension.

    tensor: a DTensor on a mesh of any number of dimensions, or a plain tensor (all of it). A rank
    that holds nothing gets an empty slice; padding is no part of it.
    """
    tensor = plain(tensor)
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def local_tensor(tensor: Tensor, padded: bool = False) -> Tensor:
    """Return this rank's shard as a plain tensor sharing its memory. padded: with padding."""
    tensor = _masters(tensor) if padded else plain(tensor)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def group_by_mesh(tensors: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Return tensors by the mesh that they are sharded over, None for plain tensors, in order.

    torch's operations on lists of tensors (norms, fused updates) take one mesh at a time.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return groups


def is_gathered_in_8_bits(tensor: Tensor) -> bool:
    """Tell whether FSDP gathers a parameter in 8 bits, see float8.py."""
    return isinstance(tensor, DTensor) and hasattr(tensor._local_tensor, "fsdp_pre_all_gather")


def plain(tensor: Tensor) -> Tensor:
    """Return what a checkpoint has of a parameter, sharing its memory; all else as it is.

    That is the masters of what FSDP gathers in 8 bits, and a padded parameter without padding.
    """
    return without_padding(_masters(tensor), tensor)


def _masters(tensor: Tensor) -> Tensor:
    """Return a parameter without the class that torchao gives it, which no file should hold."""
    if is_gathered_in_8_bits(tensor):
        return DTensor(tensor._local_tensor._tensor, tensor._spec, requires_grad=False)
    return tensor


def without_padding(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a parameter, or a state of its shape, without its padding, sharing its memory."""
    if not hasattr(parameter, _REAL_ROWS) or tensor.shape != parameter.shape:
        return tensor
    shape = list(tensor.shape)
    shape[ROWS] = getattr(parameter, _REAL_ROWS)
    mesh = tensor.device_mesh
    placements = tensor.placements
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, tensor.dtype)
    return DTensor(
        tensor._local_tensor.narrow(ROWS, 0, sizes[ROWS]),
        DTensorSpec(mesh, placements, meta),
        requires_grad=False,
    )


def is_frozen(model: nn.Module) -> bool:
    """Tell whether a model has parameters that are not trained: see lora.py."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def size_of(model: PreTrainedModel) -> str:
    """Say how many parameters a model has, and how many are trained where not all are."""
    text = f"{units.count(model.num_parameters())} parameters"
    if is_frozen(model):
        text += f", {units.count(model.num_parameters(only_trainable=True))} trained"
    return text


def tie_again(model: PreTrainedModel) -> None:
    """Make tied weights one parameter again after `to_empty`, where that is needed.

    `to_empty` keeps a shared DTensor shared and gives a shared plain parameter one memory per name.
    Nothing is done to the former: `tie_weights` also pads a head's bias, which would put it outside
    the memory that FSDP knows.
    """
    if any(
        model.get_parameter(name) is not model.get_parameter(source)
        for name, source in model.all_tied_weights_keys.items()
    ):
        model.tie_weights()


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's own class, which sharding puts behind one of its making."""
    line = type(module).__mro__
    ours = [line.index(kind) for kind in (FSDPModule, Padded) if kind in line]
    return line[max(ours) + 1] if ours else line[0]


@contextlib.contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give all modules their own class back for the while.

    transformers looks up key conversions and initialisation rules by the name of the class, and
    finds none for FSDPGPTNeoXForCausalLM (5.17 to 5.23).
    """
    sharded = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    try:
        for module, _ in sharded:
            module.__class__ = own_class(module)
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind
