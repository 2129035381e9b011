"""Find a rank's part of a sharded parameter, and the original class of a sharded module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Private, but the only function that supports every placement (uneven, strided, several mesh
# dimensions). torch's checkpoint code calls it too. Same signature in torch 2.11 to 2.13.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from lib.core import units

ROWS = 1  # the dimension of [experts, rows, columns] that is padded
_REAL_ROWS = "real_rows"  # attribute of a padded parameter


class Placement(NamedTuple):
    """How a model will be sharded.

    shard_size: ranks per replica. offload: whether shards are in host memory. device: `cuda` or
    `cpu`. ranks_of: (name, shape) → number of ranks that share this parameter. If it is None,
    `shard_size` ranks share every parameter.
    """

    shard_size: int = 1
    offload: bool = False
    device: str = "cpu"
    ranks_of: Callable[[str, Sequence[int]], int] | None = None

    def count_ranks(self, name: str, shape: Sequence[int]) -> int:
        """Return the number of ranks that will share a parameter."""
        return self.shard_size if self.ranks_of is None else self.ranks_of(name, shape)


class Padded:
    """Base class of modules with padded parameters, see lib/parallel/placement.py.

    rows: number of rows without padding, by name of the parameter.
    """

    rows: Mapping[str, int]


def mark_padded(model: nn.Module) -> None:
    """Store on each padded parameter its number of rows without padding, and zero the padding.

    Call this after the parameters were allocated. Padding has no gradient, so it stays zero.
    """
    for module in model.modules():
        for name, rows in module.rows.items() if isinstance(module, Padded) else ():
            parameter = module._parameters[name]
            setattr(parameter, _REAL_ROWS, rows)
            padded = local_tensor(parameter, padded=True)
            real = local_tensor(parameter)
            padded.narrow(ROWS, real.shape[ROWS], padded.shape[ROWS] - real.shape[ROWS]).zero_()


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return this rank's part of the full tensor, without padding, as one slice per dimension.

    tensor: a DTensor on a mesh of any number of dimensions, or a plain tensor, which is complete on
    each rank. A slice is empty if the rank has no elements.
    """
    tensor = plain(tensor)
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def local_tensor(tensor: Tensor, padded: bool = False) -> Tensor:
    """Return this rank's shard as a plain tensor that shares its memory. padded: keep padding."""
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
    """Return whether FSDP all-gathers a parameter in 8 bits, see float8.py."""
    return isinstance(tensor, DTensor) and hasattr(tensor._local_tensor, "fsdp_pre_all_gather")


def plain(tensor: Tensor) -> Tensor:
    """Return a parameter as a checkpoint stores it, sharing its memory.

    This removes padding, and the tensor class of parameters that FSDP gathers in 8 bits.
    """
    return without_padding(_masters(tensor), tensor)


def _masters(tensor: Tensor) -> Tensor:
    """Return the master weights of a parameter without torchao's tensor class."""
    if is_gathered_in_8_bits(tensor):
        local = tensor._local_tensor
        masters, *_ = local.__tensor_flatten__()[0]
        return DTensor(getattr(local, masters), tensor._spec, requires_grad=False)
    return tensor


def without_padding(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a parameter, or an optimizer state of the same shape, as a view without padding.

    tensor: returned unchanged if its shape differs from the shape of the padded parameter.
    """
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
    """Return whether a model has frozen parameters, see lora.py."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def describe_size(model: PreTrainedModel) -> str:
    """Return, as text, the number of parameters, and of trained ones if some are frozen."""
    text = f"{units.count(model.num_parameters())} parameters"
    if is_frozen(model):
        text += f", {units.count(model.num_parameters(only_trainable=True))} trained"
    return text


def restore_ties(model: PreTrainedModel) -> None:
    """Tie weights again that `to_empty` has separated.

    `to_empty` separates plain parameters but not DTensors. `tie_weights` is not called if weights
    are still tied: it also pads the bias of the output layer, and FSDP would not know the new
    memory of the bias.
    """
    if any(
        model.get_parameter(name) is not model.get_parameter(source)
        for name, source in model.all_tied_weights_keys.items()
    ):
        model.tie_weights()


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the original class of a module; sharding and padding replace it by a subclass."""
    classes = type(module).__mro__
    positions = [classes.index(kind) for kind in (FSDPModule, Padded) if kind in classes]
    return classes[max(positions) + 1] if positions else classes[0]


@contextlib.contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give all modules their original class while this context is open.

    transformers (5.17 to 5.23) finds key conversions and initialisation rules by the name of the
    class, and has none for FSDPGPTNeoXForCausalLM.
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
