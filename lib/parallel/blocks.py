"""What each decoder block does besides its layers: forget and recompute activations, be compiled.

Both wrap the block's own `forward`, inside of what sharding hooks around it, so neither changes a
module's name and a checkpoint fits whatever was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lib.models.architecture import decoder_layers
from lib.parallel.compiling import Compiler

# What selective checkpointing keeps: the results that are dear to compute again. The rest (norms,
# activations, rotations) costs memory traffic alone.
_KEPT = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm",
         "aten::_scaled_mm", "torch_attn::_varlen_attn",
         "aten::_scaled_dot_product_flash_attention",
         "aten::_scaled_dot_product_efficient_attention",
         "aten::_scaled_dot_product_cudnn_attention",
         "aten::_scaled_dot_product_flash_attention_for_cpu"}
# To these, transformers (5.23) adds the biases of experts in place. PyTorch refuses to keep what
# changes, and rightly: the biases would be added twice.
_BIASED = {"aten::bmm", "aten::_grouped_mm"}


def prepare(model: nn.Module, recompute: str, compiler: Compiler | None) -> None:
    """Wrap the forward of every decoder block; must come before sharding.

    recompute: none, selective (what is cheap) or full (all but the block's input). compiler: None
    to leave them as they are.
    """
    for block in decoder_layers(model).values():
        forward = block.forward
        if recompute != "none":
            forward = _recomputing(forward, _kept(block) if recompute == "selective" else None)
        if compiler is not None:
            forward = compiler.wrap(forward)
        if forward is not block.forward:
            block.forward = forward


def _kept(block: nn.Module) -> Set[str]:
    """Return the operations whose results a block keeps with selective checkpointing."""
    is_biased = any(getattr(module, "has_bias", False) for module in block.modules())
    return _KEPT - _BIASED if is_biased else _KEPT


def _recomputing(forward: Callable[..., Any], kept: Set[str] | None) -> Callable[..., Any]:
    contexts = {} if kept is None else {
        "context_fn": partial(create_selective_checkpoint_contexts, partial(_policy, kept))}

    def recomputed(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **contexts, **named)
    return recomputed


def _policy(kept: Set[str], _: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keep = operation.name().partition(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
