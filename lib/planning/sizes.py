"""Count the bytes that a run holds: states, gathered weights, activations, checkpoints.

All of it follows from the shapes of a model's parameters; `trace` measures what does not.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lib.models.architecture import decoder_layers
from lib.models.tensors import COMPUTE_DTYPES
from lib.optim import registry
from lib.planning.tracker import Bytes

_FLOAT32 = 4  # bytes
_BFLOAT16 = 2
# Bytes kept for the backward pass, per token and feature of a layer; counted in bf16 with sdpa,
# which keeps no attention matrix (transformers 5.23): 46 to 53 for the shapes of Llama, 32 for
# GPT-NeoX, 43 for Falcon, 114 for GPT-2 with its dropout. The 34 of Korthikanti et al. 2022
# (arXiv:2205.05198) omit what RMSNorm and RoPE do in float32, and the third matrix of SwiGLU.
_PER_FEATURE = 50
_PER_LOGIT = 14  # bf16 logits; in float32 the copy, its softmax and its gradient


def count_states(model: PreTrainedModel, optimizer: str, shard_size: int) -> Bytes:
    """Return the bytes of a rank's weights, gradients and optimizer states.

    Frozen weights have neither gradients nor states. optimizer: its name.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    total = {
        "parameters": weights,
        "gradients": _FLOAT32 * model.num_parameters(only_trainable=True),
        "optimizer": registry.count_state_bytes(optimizer, model),
    }
    return {kind: round(size / shard_size) for kind, size in total.items()}


def count_checkpoint(model: PreTrainedModel, optimizer: str) -> int:
    """Return the bytes of a checkpoint: float32 masters and states of the trained parameters."""
    masters = _FLOAT32 * model.num_parameters(only_trainable=True)
    return masters + registry.count_state_bytes(optimizer, model)


def count_gathered(model: PreTrainedModel, shard_size: int, precision: str) -> int:
    """Return the bytes of all weights that FSDP gathers, in the precision they are gathered in.

    Frozen weights are not gathered if each rank holds all of them.
    """
    return COMPUTE_DTYPES[precision].itemsize * sum(
        p.numel() for p in model.parameters() if p.requires_grad or shard_size > 1
    )


def estimate_activations(model: PreTrainedModel, tokens: int, precision: str) -> tuple[int, int]:
    """Estimate the bytes of activations and of gathered weights from the shape of a model.

    tokens: in one pass.
    """
    blocks = list(decoder_layers(model).values())
    largest = max(map(_count_parameters, blocks), default=0)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows, features = embedding.weight.shape
    wider = 2 if precision == "fp32" else 1
    # One block, the next one prefetched, the gradients of one; weights and gradients of the head.
    gathered = wider * _BFLOAT16 * (3 * largest + 2 * _count_parameters(head or embedding))
    kept = wider * tokens * (_PER_FEATURE * features * len(blocks) + _PER_LOGIT * rows)
    return kept, gathered


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
