"""Experts of which a layer holds all in one parameter, and why these have no adapters.

Transformers (5.23) keeps them as [experts, rows, columns]: an experts module of Mixtral or Qwen MoE
has the parameters gate_up_proj and down_proj, and no linear. A linear's adapter cannot be put
beside one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from lib.core import units
from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.sharded import own_class

_SHOWN = 8


def find(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of the blocks that hold weights or biases of several experts, by name.
    """
    return {f"{path}.{name}": parameter
            for block_name, block in decoder_layers(model).items()
            for path, module in block.named_modules(prefix=block_name)
            if "expert" in own_class(module).__name__.lower() and not isinstance(module, nn.Linear)
            for name, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1}


def refuse(model: PreTrainedModel, targets: str, matches: Callable[[str], bool]) -> None:
    """Raise UsageError where targets match such a parameter, or the module that has it.

    What else they match does not matter: the experts would be left out in silence.
    """
    if fused := [name for name in find(model)
                 if matches(name) or matches(name.rpartition(".")[0])]:
        raise UsageError(f"--lora-targets {targets} matches experts, which cannot have adapters: "
                         "all those of a layer are one parameter",
                         expected="a regular expression that matches linears of the blocks alone, "
                                  "by their whole names if need be",
                         found=units.join_lines(fused, _SHOWN))


def left_out(model: PreTrainedModel) -> str:
    """Say how many parameters of experts stay without an adapter; nothing where there are none."""
    numbers = sum(parameter.numel() for parameter in find(model).values())
    return f"; {units.count(numbers)} parameters are of fused experts, which have no adapters" \
        if numbers else ""
