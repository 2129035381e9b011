"""Chooses the linears and the weights of experts that get a LoRA adapter, by their names."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.float8 import ROUTERS
from lib.models.keys import Added
from lib.models.sharded import own_class

ALL = "all-linear"
ATTENTION = "attention"
MLP = "mlp"
# Classes whose `forward` is nothing but the product. Conv1D, of GPT-2 and its like, has its weight
# the other way round: [in, out].
_LINEARS = ("Linear", "FalconLinear", "Conv1D")
_TRANSPOSED = "Conv1D"
_ROUTERS = (*ROUTERS, "shared_expert_gate")
_SHOWN = 8


def choose_linears(model: PreTrainedModel, targets: str) -> list[str]:
    """Return the names of the linears of a model's blocks that targets stand for, in order.

    Routers are among them only where a regular expression names them. Raises UsageError where none
    is, and for a regular expression that matches some of them and the output layer or embedding.
    """
    kinds = list_linears(model)
    if targets in (ALL, ATTENTION, MLP):
        chosen = [
            name for name, kind in kinds.items() if kind != "router" and targets in (ALL, kind)
        ]
    else:
        chosen = [name for name in kinds if matches_name(targets, name)]
        if len(chosen) < len(kinds):  # what matches all means the blocks
            _require_in_blocks(model, targets)
    if not chosen and not choose_experts(model, targets):
        leaves = sorted({name.rpartition(".")[2] for name in kinds})
        raise UsageError(
            f"--lora-targets {targets} matches no linear in the blocks of a "
            f"{model.config.model_type} model",
            expected="the names of some of its linears, or a regular expression that matches them",
            found=", ".join(leaves[:_SHOWN]) or "no linear at all",
        )
    return chosen


def choose_experts(model: PreTrainedModel, targets: str) -> list[str]:
    """Return the names of weights of experts that a regular expression matches.

    It may match the name of the weight or of the module that has it.
    """
    if targets in (ALL, ATTENTION, MLP):
        return []
    return [
        name
        for name in list_expert_weights(model)
        if matches_name(targets, name) or matches_name(targets, name.rpartition(".")[0])
    ]


def matches_name(pattern: str, name: str) -> bool:
    """Tell whether a regular expression matches a whole name, or the whole last part of it."""
    return any(re.fullmatch(pattern, text) for text in (name, name.rpartition(".")[2]))


def list_linears(model: PreTrainedModel) -> dict[str, str]:
    """Return the linears of the blocks by name: each is of attention, mlp or a router."""
    found: dict[str, str] = {}
    for block_name, block in decoder_layers(model).items():
        attention = [
            f"{name}."
            for name, module in block.named_modules(prefix=block_name)
            if "attention" in own_class(module).__name__.lower() and module is not block
        ]
        for name, module in block.named_modules(prefix=block_name):
            if own_class(module).__name__ in _LINEARS:
                is_attention = name.startswith(tuple(attention))
                found[name] = ATTENTION if is_attention else MLP
                if name.rpartition(".")[2] in _ROUTERS:
                    found[name] = "router"
    return found


def list_expert_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
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


def _require_in_blocks(model: PreTrainedModel, pattern: str) -> None:
    """Raise UsageError where a regular expression matches an embedding or the output layer."""
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    if outside := [
        name
        for name, module in model.named_modules()
        if id(module) in ends and matches_name(pattern, name)
    ]:
        raise UsageError(
            f"--lora-targets {pattern} matches {' and '.join(outside)}, which can "
            "have no adapter: only linears of the blocks can"
        )


def count_features(linear: nn.Module) -> tuple[int, int]:
    """Return the features that a linear gives and takes."""
    rows, columns = linear.weight.shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def is_transposed(linear: nn.Module) -> bool:
    """Tell whether a linear has its weight as [in, out]."""
    return own_class(linear).__name__ == _TRANSPOSED
