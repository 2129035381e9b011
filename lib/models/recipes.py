"""Build a parameter of a model, or only a part of it, from the tensors of a Hub checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import Concatenate, MergeModulelist, WeightConverter

from lib.models.tensors import StoredTensors, TensorPart


class Recipe(Protocol):
    """Builds a parameter, or this rank's part of it, from the checkpoint's tensors in `keys`."""

    @property
    def keys(self) -> tuple[str, ...]: ...
    def read(self, tensors: StoredTensors, part: TensorPart) -> Tensor: ...


@dataclass(frozen=True)
class Renamed:
    """Reads one tensor unchanged, possibly under another name."""

    keys: tuple[str]

    def read(self, tensors: StoredTensors, part: TensorPart) -> Tensor:
        """Return the part; only its bytes are read."""
        return tensors.read(self.keys[0], part)


@dataclass(frozen=True)
class Stacked:
    """Stacks the tensors of all experts for each kind, and concatenates the kinds along `dim`.

    kinds: the tensors' names, [kind][expert], where kinds are w1 and w3, for example. dim:
    dimension of the stacked tensor, at least 1. Only the experts and rows of a part are read.
    """

    kinds: tuple[tuple[str, ...], ...]
    dim: int = 1

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of all tensors in the checkpoint."""
        return sum(self.kinds, ())

    def read(self, tensors: StoredTensors, part: TensorPart) -> Tensor:
        """Return the part, [experts, …], with the kinds concatenated along `dim`."""
        experts = part[0]
        inner = list(part[1:])
        along = self.dim - 1  # the same dimension in the tensor of one expert
        pieces = []
        start = 0
        for kind in self.kinds:
            size = tensors.shapes[kind[0]][along]
            begin, end = (
                min(max(edge - start, 0), size)
                for edge in (part[self.dim].start, part[self.dim].stop)
            )
            start += size
            if begin < end or len(self.kinds) == 1:
                inner[along] = slice(begin, end)
                pieces.append(
                    torch.stack([tensors.read(key, tuple(inner)) for key in kind[experts]])
                )
        return torch.cat(pieces, dim=self.dim)


@dataclass(frozen=True)
class Converted:
    """Reads all tensors completely and converts them with transformers' operations.

    For a short time this needs the memory of the full tensor. convert: takes the checkpoint's
    tensors by name, and returns parameters by name. name: the parameter to keep.
    """

    keys: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    name: str

    def read(self, tensors: StoredTensors, part: TensorPart) -> Tensor:
        """Return the part of the converted tensor; the rest is discarded."""
        return self.convert({key: tensors.read(key) for key in self.keys})[self.name][part]


def stack_experts(
    converter: WeightConverter, sources: Mapping[str, list[str]], ndim: int
) -> Stacked | None:
    """Return the recipe for a conversion that only stacks experts, or None for other conversions.

    sources: for each pattern of the converter, the names of the matching tensors in the checkpoint,
    in the order of the experts. ndim: number of dimensions of the stacked tensor.
    """
    merge, *join = converter.operations
    if type(merge) is not MergeModulelist or merge.dim != 0 or len(join) > 1 or ndim < 2:
        return None
    # Concatenate joins in the order of the patterns, whatever the order of the tensors.
    keys = tuple(
        tuple(sources[pattern]) for pattern in converter.source_patterns if pattern in sources
    )
    if not join:
        return Stacked(keys) if len(keys) == 1 else None
    is_plain = type(join[0]) is Concatenate and join[0].dim > 0
    return Stacked(keys, join[0].dim) if is_plain else None
