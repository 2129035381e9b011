"""What a step of training takes beside its states, at a guess from the shape of the model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lib.models.architecture import decoder_layers

_COMPUTE = 2  # bytes of a number in bf16
# Bytes kept for the backward pass, per token and feature of a layer; counted in bf16 with sdpa,
# which keeps no attention matrix (transformers 5.23): 46 to 53 for the shapes of Llama, 32 for
# GPT-NeoX, 43 for Falcon, 114 for GPT-2 with its dropout. The 34 of Korthikanti et al. 2022
# (arXiv:2205.05198) leave out what RMSNorm and RoPE do in float32, and the third matrix of SwiGLU.
_PER_FEATURE = 50
_PER_LOGIT = 14  # bf16 logits; in float32 the copy, its softmax and its gradient


def beside_states(model: PreTrainedModel, tokens: int, precision: str) -> tuple[int, int]:
    """Return the bytes of activations, and of gathered weights, in a pass of so many tokens."""
    blocks = list(decoder_layers(model).values())
    largest = max(map(_count, blocks), default=0)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows, features = embedding.weight.shape
    wider = 2 if precision == "fp32" else 1
    # A block, the one fetched ahead, and the gradients of one; weights and gradients of the head.
    gathered = wider * _COMPUTE * (3 * largest + 2 * _count(head or embedding))
    kept = wider * tokens * (_PER_FEATURE * features * len(blocks) + _PER_LOGIT * rows)
    return kept, gathered


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
