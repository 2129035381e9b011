"""Compute the linear layers of the blocks in 8-bit floats with torchao, for `--precision fp8`.

A layer computes three matrix products: one forward, and one each for the gradients of its input and
its weight. Right before each product, it casts both operands to 8 bits, with one scale per tensor
or per row. Embeddings, norms, experts and the output layer compute in bf16. Master weights stay
float32 under their names, so checkpoints do not depend on the precision.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands, units
from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.sharded import Placement, is_gathered_in_8_bits

MULTIPLE = 16  # the kernels need sizes that are multiples of this
_LINEARS = ("Linear", "FalconLinear")  # classes whose `forward` is only the matrix product
ROUTERS = ("gate", "router")  # small layers that choose experts and need precision
_NOISY = ("torchao", "torch.utils._pytree")  # loggers that are silenced while torchao is imported


def require_package() -> None:
    """Raise UsageError if torchao is not installed, without importing it."""
    try:
        importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "--precision fp8 needs torchao, which is not installed",
            hint="a bundle of `airgap.py pack --optional` contains its wheels; "
            "or install it from a package index:",
            run=commands.pip_install_optional("torchao"),
        ) from None


@dataclass(frozen=True)
class Float8:
    """Computes linear layers in 8-bit floats.

    recipe: `tensorwise` for one scale per tensor, `rowwise` for one per row.
    """

    recipe: str

    changes_memory_plan = False  # memory is estimated as for bf16

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Convert the linear layers of a model's blocks; no parameter is added.

        FSDP all-gathers weights that are already cast to 8 bits, half the bytes of bf16, unless
        scales are per row, the rows do not divide evenly among ranks, or shards are in host memory.
        If every rank holds all weights, nothing is gathered. Compiled blocks then cast the weights
        with half the memory traffic of FSDP's casts. On a CPU, values are rounded to 8 bits and
        multiplied in float32.
        Raises UsageError if the model has no layer to convert.
        """
        chosen, skipped = _choose_linears(model)
        if not chosen:
            raise UsageError(
                f"--precision fp8 changes nothing in a {model.config.model_type} model",
                found="; ".join(skipped) or "no linear layer in its blocks",
                expected=f"linear layers whose sizes are multiples of {MULTIPLE}",
                run=commands.as_typed("--precision", "bf16"),
            )
        ranks = {
            name: placement.count_ranks(f"{name}.weight", linear.weight.shape)
            for name, linear in chosen.items()
        }
        is_sharded = any(count > 1 for count in ranks.values())
        even = {
            name
            for name, linear in chosen.items()
            if self.recipe == "tensorwise"
            and ranks[name] > 1
            and not placement.offload
            and linear.out_features % ranks[name] == 0
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
                f"fp8: {units.counted(len(chosen), 'linear layer')} of the blocks in 8-bit floats, "
                f"scaled {self.recipe}{gathered}",
                *skipped,
                "the rest in bf16",
            ]
        )

    def owns(self, name: str) -> bool:
        """Return False, because no parameter is added."""
        return False

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the tensor as it is: master weights do not depend on the precision."""
        return tensor


def update_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in 8 bits, in a single all-reduce.

    All ranks must call this after the weights have changed. FSDP casts with these scales before it
    gathers. Without this call, each weight would need an all-reduce of its own.
    """
    if any(map(is_gathered_in_8_bits, model.parameters())):
        _import_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def update_scales_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Update the scales now and after each step of an optimizer. All ranks must call this."""
    if any(map(is_gathered_in_8_bits, model.parameters())):
        update_scales(model)
        optimizer.register_step_post_hook(lambda *_: update_scales(model))


def _choose_linears(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the linear layers to convert, by name, and a description of the skipped layers."""
    chosen: dict[str, nn.Linear] = {}
    skipped: Counter[str] = Counter()
    for block_name, block in decoder_layers(model).items():
        for name, module in block.named_modules(prefix=block_name):
            weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
            if ".experts" in name:
                skipped["weights of experts"] += len(weights)
            elif not isinstance(module, nn.Linear):
                continue
            elif type(module).__name__ not in _LINEARS:
                skipped["linear layers that compute more than a product"] += 1
            elif name.rpartition(".")[2] in ROUTERS:
                skipped["routers"] += 1
            elif any(size % MULTIPLE for size in module.weight.shape):
                skipped[f"linear layers with sizes that are not multiples of {MULTIPLE}"] += 1
            else:
                chosen[name] = module
    return chosen, [f"{count:,} {kind} in bf16" for kind, count in skipped.items() if count]


def _import_torchao() -> ModuleType:
    """Import torchao.float8 without its warnings about kernels that we do not use."""
    if sys.modules.get("torchao", sys) is None:  # hidden in lib/__init__.py
        del sys.modules["torchao"]
    noisy = {logger: logger.disabled for logger in map(logging.getLogger, _NOISY)}
    for logger in noisy:
        logger.disabled = True
    try:
        from torchao import float8
    finally:
        for logger, was_disabled in noisy.items():
            logger.disabled = was_disabled
    return float8
