"""Adapters of experts of which a layer holds all in one parameter.

Transformers (5.23) keeps them as [experts, rows, columns]: an experts module of Mixtral or Qwen MoE
has the parameters gate_up_proj and down_proj, and no linear. Only a regular expression that names
such a parameter gives it an adapter: an A [experts, rank, columns] and a B [experts, rows, rank],
of which s B A is added to the parameter for as long as the experts compute. Whatever they do with
it, transposed or not, is done with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import units
from lib.models.architecture import decoder_layers
from lib.models.keys import Added
from lib.models.sharded import own_class

_PREFIX = "lora_"


class ExpertFactor(Added):
    """Holds A or B of all experts. drawn: its first values are, else they are zero."""

    def __init__(self, *shape: int, drawn: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.float32))
        self.drawn = drawn

    def draw(self, full: Tensor) -> None:
        """Give A its first values, expert by expert; those of B are zero."""
        for expert in full if self.drawn else ():
            nn.init.kaiming_uniform_(expert, a=math.sqrt(5))


class ExpertAdapter(nn.Module):
    """Stands beside the parameter that it belongs to."""

    def __init__(self, parameter: nn.Parameter, rank: int, scale: float) -> None:
        super().__init__()
        experts, rows, columns = parameter.shape
        self.lora_A = ExpertFactor(experts, rank, columns, drawn=True)
        self.lora_B = ExpertFactor(experts, rows, rank, drawn=False)
        self.scale = scale

    def added_to(self, whole: Tensor) -> Tensor:
        """Return W + s B A; whole: [experts, rows, columns], perhaps with rows of padding."""
        product = torch.bmm(self.lora_B.weight * self.scale, self.lora_A.weight)
        return whole + F.pad(product, (0, 0, 0, whole.shape[1] - product.shape[1]))


def find(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights of the blocks that are of several experts, by name."""
    return {
        f"{path}.{name}": parameter
        for block_name, block in decoder_layers(model).items()
        for path, module in block.named_modules(prefix=block_name)
        if "expert" in own_class(module).__name__.lower()
        and not isinstance(module, nn.Linear | Added)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def choose(model: PreTrainedModel, matches: Callable[[str], bool]) -> list[str]:
    """Return the names of such weights that match, themselves or by the module that has them."""
    return [name for name in find(model) if matches(name) or matches(name.rpartition(".")[0])]


def attach(model: PreTrainedModel, names: list[str], rank: int, scale: float) -> set[str]:
    """Put adapters beside weights of experts, on meta; return their parameters' names."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(_add)
        # Also where recomputation ends early, by an exception.
        module.register_forward_hook(_take_back, always_call=True)
    for name in names:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).add_module(
            _PREFIX + leaf, ExpertAdapter(model.get_parameter(name), rank, scale)
        )
    return {f"{adapter_of(name)}.{part}.weight" for name in names for part in ("lora_A", "lora_B")}


def _add(module: nn.Module, _: Any) -> None:
    """Put W + s B A in the place of W; a hook, which copies of a model share."""
    _take_back(module)
    module.frozen = {
        name.removeprefix(_PREFIX): module._parameters[name.removeprefix(_PREFIX)]
        for name, child in module.named_children()
        if isinstance(child, ExpertAdapter)
    }
    for name, whole in module.frozen.items():
        module._parameters[name] = module.get_submodule(_PREFIX + name).added_to(whole)


def _take_back(module: nn.Module, *_: Any) -> None:
    """Put W back in its place."""
    module._parameters.update(module.__dict__.pop("frozen", {}))


def adapter_of(name: str) -> str:
    """Return the name of the adapter of such a weight."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.{_PREFIX}{leaf}"


def fold(name: str, tensor: Tensor, added: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return W + s B A in float32, or the tensor itself where it has no adapter."""
    path = adapter_of(name)
    if f"{path}.lora_A.weight" not in added:
        return tensor
    product = added[f"{path}.lora_B.weight"].float() @ added[f"{path}.lora_A.weight"].float()
    return product.mul_(scale).add_(tensor)


def left_out(model: PreTrainedModel) -> str:
    """Say how many parameters of experts stay without an adapter; nothing where there are none."""
    numbers = sum(
        parameter.numel()
        for name, parameter in find(model).items()
        if adapter_of(name) not in dict(model.named_modules())
    )
    return (
        f"; {units.count(numbers)} parameters are of fused experts, which have no adapters"
        if numbers
        else ""
    )
