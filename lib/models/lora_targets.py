"""Choose the linear layers and the parameters of experts that get a LoRA adapter, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from lib.core import patterns
from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.float8 import ROUTERS
from lib.models.keys import AddedModule
from lib.models.sharded import own_class

ALL = "all-linear"
ATTENTION = "attention"
MLP = "mlp"
# Classes whose `forward` is only the matrix product. Conv1D (GPT-2) stores its weight as [in, out].
_LINEARS = ("Linear", "FalconLinear", "Conv1D")
_TRANSPOSED = "Conv1D"
_ROUTERS = (*ROUTERS, "shared_expert_gate")
_SHOWN = 8


def choose_linears(model: PreTrainedModel, targets: str) -> list[str]:
    """Return the names of the linear layers in a model's blocks that match, in order.

    targets: as for Lora. Routers are included only if a regular expression matches them. Raises
    UsageError if no layer matches, or if a regular expression matches the embedding or the output
    layer but not all linear layers in the blocks.
    """
    kinds = list_linears(model)
    if targets in (ALL, ATTENTION, MLP):
        chosen = [
            name for name, kind in kinds.items() if kind != "router" and targets in (ALL, kind)
        ]
    else:
        chosen = filter_names(targets, kinds)
        if len(chosen) < len(kinds):  # a pattern such as `.*` is meant for all layers of the blocks
            _require_in_blocks(model, targets)
    if not chosen and not choose_experts(model, targets):
        last_parts = sorted({name.rpartition(".")[2] for name in kinds})
        raise UsageError(
            f"--lora-targets {targets} matches no linear layer in the blocks of a "
            f"{model.config.model_type} model",
            expected="names of its linear layers, or a regular expression that matches them",
            found=", ".join(last_parts[:_SHOWN]) or "no linear layer at all",
        )
    return chosen


def choose_experts(model: PreTrainedModel, targets: str) -> list[str]:
    """Return the names of experts' parameters that match a regular expression.

    The expression may match the name of the parameter or of its module. `all-linear`, `attention`
    and `mlp` match none.
    """
    if targets in (ALL, ATTENTION, MLP):
        return []
    weights = list_expert_weights(model)
    modules = filter_names(targets, {name.rpartition(".")[0] for name in weights})
    matching = filter_names(targets, weights)
    return [name for name in weights if name in matching or name.rpartition(".")[0] in modules]


def filter_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a regular expression matches as a whole, or in their last part.

    Raises UsageError if that takes too long.
    """
    with patterns.limit_time(f"--lora-targets {pattern}"):
        return [
            name
            for name in names
            if any(re.fullmatch(pattern, text) for text in (name, name.rpartition(".")[2]))
        ]


def list_linears(model: PreTrainedModel) -> dict[str, str]:
    """Return the kind (`attention`, `mlp` or `router`) of each linear layer in the blocks."""
    kinds: dict[str, str] = {}
    for block_name, block in decoder_layers(model).items():
        attention = [
            f"{name}."
            for name, module in block.named_modules(prefix=block_name)
            if "attention" in own_class(module).__name__.lower() and module is not block
        ]
        for name, module in block.named_modules(prefix=block_name):
            if own_class(module).__name__ in _LINEARS:
                is_attention = name.startswith(tuple(attention))
                kinds[name] = ATTENTION if is_attention else MLP
                if name.rpartition(".")[2] in _ROUTERS:
                    kinds[name] = "router"
    return kinds


def list_expert_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters in the blocks that contain the weights of several experts, by name."""
    return {
        f"{path}.{name}": parameter
        for block_name, block in decoder_layers(model).items()
        for path, module in block.named_modules(prefix=block_name)
        if "expert" in own_class(module).__name__.lower()
        and not isinstance(module, nn.Linear | AddedModule)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def _require_in_blocks(model: PreTrainedModel, pattern: str) -> None:
    """Raise UsageError if a regular expression matches an embedding or the output layer."""
    excluded = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    names = [name for name, module in model.named_modules() if id(module) in excluded]
    if outside := filter_names(pattern, names):
        raise UsageError(
            f"--lora-targets {pattern} matches {' and '.join(outside)}, which cannot have an "
            "adapter: only linear layers of the blocks can"
        )


def count_features(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of output and input features of a linear layer."""
    rows, columns = linear.weight.shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def is_transposed(linear: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as [in, out]."""
    return own_class(linear).__name__ == _TRANSPOSED
