"""`--precision fp8`: the linears of the blocks compute in 8-bit floats, by torchao.

Input, weight and gradient of such a linear are cast to 8 bits right before each of its three matrix
products, with a scale for the whole tensor or for each row. All else computes in bf16, as do the
embeddings, the norms, experts and the output layer. The masters stay float32 under their names, so
a checkpoint is that of any other precision.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands, units
from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.sharded import Placement, is_gathered_in_8_bits

MULTIPLE = 16  # the kernels take sizes that are multiples of it
_PACKAGE = "torchao==0.18.0"
_LINEARS = ("Linear", "FalconLinear")  # classes whose `forward` is nothing but the product
ROUTERS = ("gate", "router")  # they choose experts: few numbers, on which much depends
_NOISY = ("torchao", "torch.utils._pytree")  # while torchao is imported


def require_package() -> None:
    """Raise UsageError where torchao is not installed; imports nothing."""
    try:
        importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "--precision fp8 needs torchao, which is not installed",
            run=commands.pip_install(_PACKAGE),
        ) from None


@dataclass(frozen=True)
class Float8:
    """Has linears compute in 8-bit floats. recipe: `tensorwise` or `rowwise`, what each scale is
    for."""

    recipe: str

    before_plans = False  # which are made as for bf16

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Have the linears of a model's blocks compute in 8-bit floats; nothing is added.

        Where it can, FSDP gathers weights that are cast already, in half the bytes of bf16: not
        with scales per row, rows that cannot be dealt out evenly, or shards in host memory. A rank
        that holds all weights gathers nothing, and compiled blocks cast them for half the memory
        traffic of FSDP's casts. On a CPU the products are of rounded numbers but in float32. Raises
        UsageError for a model that has no such linear.
        """
        chosen, left = _choose_linears(model)
        if not chosen:
            raise UsageError(
                f"--precision fp8 changes nothing in a {model.config.model_type} model",
                found="; ".join(left) or "no linear in its blocks",
                expected=f"linears whose sizes are multiples of {MULTIPLE}",
                run=commands.as_typed("--precision", "bf16"),
            )
        is_sharded = placement.shard_size > 1
        even = {
            name
            for name, linear in chosen.items()
            if self.recipe == "tensorwise"
            and is_sharded
            and not placement.offload
            and linear.out_features % placement.shard_size == 0
        }
        torchao = _import_torchao()
        config = dataclasses.replace(
            torchao.Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=placement.device != "cuda",
        )
        for names, is_gathered in ((even, True), (chosen.keys() - even, False)):
            if names:
                torchao.convert_to_float8_training(
                    model,
                    module_filter_fn=lambda _, name, names=names: name in names,
                    config=dataclasses.replace(config, enable_fsdp_float8_all_gather=is_gathered),
                )
        gathered = ""
        if is_sharded and not even:
            gathered = " (gathered in bf16)"
        elif is_sharded and len(even) < len(chosen):
            gathered = f" ({len(chosen) - len(even):,} of them gathered in bf16)"
        return set(), "; ".join(
            [
                f"fp8: {units.counted(len(chosen), 'linear')} of the blocks in 8-bit floats, "
                f"scaled {self.recipe}{gathered}",
                *left,
                "the rest in bf16",
            ]
        )

    def owns(self, name: str) -> bool:
        """Return False: nothing is added."""
        return False

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the tensor: masters are those of any other precision."""
        return tensor


def rescale(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in 8 bits, with a single exchange.

    All ranks must call this after the weights have changed: what is gathered next is cast by these
    scales. Without them each weight would find its own in an exchange of its own.
    """
    if any(map(is_gathered_in_8_bits, model.parameters())):
        _import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def rescale_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Compute the scales now and after each step of an optimizer; all ranks must call this."""
    if any(map(is_gathered_in_8_bits, model.parameters())):
        rescale(model)
        optimizer.register_step_post_hook(lambda *_: rescale(model))


def _choose_linears(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the linears to compute in 8 bits by name, and what is said of those that are not."""
    chosen: dict[str, nn.Linear] = {}
    left: Counter[str] = Counter()
    for block_name, block in decoder_layers(model).items():
        for name, module in block.named_modules(prefix=block_name):
            weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
            if ".experts" in name:
                left["weights of experts"] += len(weights)
            elif not isinstance(module, nn.Linear):
                continue
            elif type(module).__name__ not in _LINEARS:
                left["linears that do more than a product"] += 1
            elif name.rpartition(".")[2] in ROUTERS:
                left["routers"] += 1
            elif any(size % MULTIPLE for size in module.weight.shape):
                left[f"linears with sizes that are no multiples of {MULTIPLE}"] += 1
            else:
                chosen[name] = module
    return chosen, [f"{count:,} {what} in bf16" for what, count in left.items() if count]


def _import_torchao() -> ModuleType:
    """Return torchao.float8, imported without warnings of kernels that nothing here uses."""
    if sys.modules.get("torchao", sys) is None:  # hidden in lib/__init__.py
        del sys.modules["torchao"]
    with ExitStack() as stack:
        for name in _NOISY:
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        from torchao import float8
    return float8
