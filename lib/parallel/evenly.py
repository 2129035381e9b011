"""Experts dealt out evenly, whatever the number of ranks.

FSDP2 shards a parameter along its first dimension. That of a layer's experts is how many there are,
and ranks that share 8 experts 16 ways or 6 ways hold one each, two, or none. Such a parameter is
sharded along its next dimension, the rows of each expert's matrix. FSDP2 (2.13) shards other
dimensions than the first only where the ranks divide them, so rows are padded where they do not.
The module sees its experts without padding, and so do checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lib.models.sharded import ROWS, Padded

_EVEN = 1.15  # what the largest shard of a parameter may be of the mean


def sharded_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension along which so many ranks share a parameter.

    Matrices are shared by their rows in any case: one of few rows is small. Of more dimensions the
    second is taken where that is more even: a convolution of [channels, 1, width] has it no more.
    """
    return (
        ROWS
        if len(shape) > 2 and unevenness(shape, ranks) > max(_EVEN, unevenness(shape, ranks, ROWS))
        else 0
    )


def unevenness(shape: Sequence[int], ranks: int, dim: int = 0) -> float:
    """Return what the first rank holds of a parameter, as a multiple of the mean."""
    return math.ceil(shape[dim] / ranks) * ranks / shape[dim]


def cuts_blocks(shape: Sequence[int], ranks: int, block: int) -> bool:
    """Tell whether ranks share the rows of experts such that blocks of an expert's numbers are cut.

    block: numbers. Padding counts as a cut: the blocks behind it would begin elsewhere.
    """
    return sharded_dim(shape, ranks) == ROWS and bool(
        shape[ROWS] % ranks or shape[ROWS] // ranks * math.prod(shape[ROWS + 1 :]) % block
    )


def pad(model: nn.Module, ranks: int) -> None:
    """Pad the parameters of a model on the meta device that the ranks cannot share evenly.

    The modules that have them get a class of the same name, see `Padded`.
    """
    for module in list(model.modules()):
        rows: dict[str, int] = {}
        for name, parameter in module.named_parameters(recurse=False):
            shape = list(parameter.shape)
            if sharded_dim(shape, ranks) == ROWS and shape[ROWS] % ranks:
                rows[name] = shape[ROWS]
                shape[ROWS] += -shape[ROWS] % ranks
                module.register_parameter(
                    name,
                    nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad),
                )
        if rows:
            cls = type(module)
            module.__class__ = type(
                cls.__name__,
                (Padded, cls),
                {
                    "rows": rows,
                    **{name: _without_padding(name, size) for name, size in rows.items()},
                },
            )


def _without_padding(name: str, rows: int) -> property:
    """Return what a module has in the place of a parameter: while it is whole, its rows alone."""

    def narrowed(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return parameter
        return parameter.narrow(ROWS, 0, rows)

    return property(narrowed)
