"""Decide how ranks share each parameter: over which mesh, which dimension, which padding.

FSDP2 shards a parameter along its first dimension. For the weights of a layer's experts, that is
the number of experts: with 8 experts, some of 6 ranks would get two experts and others one, and
some of 16 ranks none. Such a parameter is sharded along its next dimension instead, the rows of
each expert's matrix. FSDP2 (2.13) shards dimensions other than the first only in equal parts, so
the rows are padded if necessary. Neither the module nor a checkpoint sees the padding.

All parameters are on one mesh so far. To put some on another one, as expert parallelism does, add
it to `derive_meshes` and `shard_sizes`, and name it in `choose_mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lib.models.sharded import ROWS, Padded

FSDP = "fsdp"  # name of the default mesh
_EVEN = 1.15  # shards are even if the largest one is at most this multiple of the mean


class ParameterPlacement(NamedTuple):
    """How ranks share a parameter.

    mesh: name of the mesh. ranks: number of ranks that share the parameter. dim: the sharded
    dimension. padding: rows to append to that dimension. largest: size of the first rank's shard,
    which is the largest one, as a multiple of the mean.
    """

    mesh: str
    ranks: int
    dim: int
    padding: int
    largest: float


def derive_meshes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return all meshes by name; all ranks must call this.

    mesh: the default one, (shard) or (replicate, shard). Parameters are sharded over the last
    dimension of each mesh.
    """
    return {FSDP: mesh}


def shard_sizes(shard_size: int) -> dict[str, int]:
    """Return for each mesh the number of ranks that share a parameter.

    shard_size: the number for the default mesh.
    """
    return {FSDP: shard_size}


def choose_mesh(name: str) -> str:
    """Return the name of the mesh of a parameter. name: its name in the model."""
    return FSDP


def place_parameter(
    name: str, shape: Sequence[int], sizes: Mapping[str, int]
) -> ParameterPlacement:
    """Return how ranks share a parameter.

    shape: the shape of the full parameter, with or without padding. sizes: the result of
    `shard_sizes`.
    """
    mesh = choose_mesh(name)
    ranks = sizes[mesh]
    dim = _choose_dim(shape, ranks)
    padding = -shape[dim] % ranks if dim == ROWS else 0
    return ParameterPlacement(mesh, ranks, dim, padding, _largest_shard(shape, ranks, dim))


def count_ranks_in(shard_size: int) -> Callable[[str, Sequence[int]], int]:
    """Return a function (name, shape) that counts the ranks that share a parameter.

    shard_size: see `shard_sizes`.
    """
    sizes = shard_sizes(shard_size)

    def count_ranks(name: str, shape: Sequence[int]) -> int:
        return place_parameter(name, shape, sizes).ranks

    return count_ranks


def _choose_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension along which ranks share a parameter.

    A matrix is always sharded by its rows, because a matrix with few rows is small. With more
    dimensions, the second one is chosen if its shards are more even. A convolution of
    [channels, 1, width] keeps the first one.
    """
    first = _largest_shard(shape, ranks, 0)
    return ROWS if len(shape) > 2 and first > max(_EVEN, _largest_shard(shape, ranks, ROWS)) else 0


def _largest_shard(shape: Sequence[int], ranks: int, dim: int) -> float:
    """Return the size of the first rank's shard as a multiple of the mean."""
    return math.ceil(shape[dim] / ranks) * ranks / shape[dim]


def list_cut_shapes(model: nn.Module, shard_size: int, block: int) -> list[Sequence[int]]:
    """Return the shapes of the parameters whose blocks would be split between ranks.

    block: count of adjacent elements of a row that must be on the same rank. Padding counts as a
    split, because the blocks after it would begin at other elements.
    """
    sizes = shard_sizes(shard_size)
    return [p.shape for name, p in model.named_parameters() if _is_cut(name, p.shape, sizes, block)]


def _is_cut(name: str, shape: Sequence[int], sizes: Mapping[str, int], block: int) -> bool:
    placed = place_parameter(name, shape, sizes)
    if placed.dim != ROWS:
        return False
    numbers = shape[ROWS] // placed.ranks * math.prod(shape[ROWS + 1 :])
    return bool(placed.padding or numbers % block)


def pad_parameters(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Pad the parameters of a meta-device model that ranks cannot share in equal parts.

    Modules with such parameters get a subclass of the same name, see `Padded`.
    """
    for prefix, module in list(model.named_modules()):
        rows: dict[str, int] = {}
        for name, parameter in module.named_parameters(recurse=False):
            shape = list(parameter.shape)
            placed = place_parameter(f"{prefix}.{name}".lstrip("."), shape, sizes)
            if not placed.padding:
                continue
            rows[name] = shape[ROWS]
            shape[ROWS] += placed.padding
            padded = parameter.new_empty(shape)
            module.register_parameter(
                name, nn.Parameter(padded, requires_grad=parameter.requires_grad)
            )
        if rows:
            cls = type(module)
            properties = {name: _hide_padding(name, size) for name, size in rows.items()}
            module.__class__ = type(cls.__name__, (Padded, cls), {"rows": rows, **properties})


def _hide_padding(name: str, rows: int) -> property:
    """Return a property for a parameter that returns the gathered parameter without padding."""

    def narrow(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return parameter
        return parameter.narrow(ROWS, 0, rows)

    return property(narrow)


def modules_on_other_meshes(
    model: nn.Module, placements: Mapping[nn.Parameter, ParameterPlacement]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that are completely on another mesh, with the mesh's name.

    Raises ValueError for a module that itself has parameters on several meshes, or on another mesh
    than its children: FSDP2 gathers the parameters of a module together.
    """
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        direct = {placements[p].mesh for p in module.parameters(recurse=False)}
        meshes = {placements[p].mesh for p in module.parameters()}
        if module in seen or meshes <= {FSDP}:
            continue
        if len(meshes) == 1:
            seen |= set(module.modules())
            yield meshes.pop(), module
        elif direct - {FSDP}:
            raise ValueError(f"{name}: parameters on the meshes {', '.join(sorted(meshes))}")
