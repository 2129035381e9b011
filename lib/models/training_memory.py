"""Estimates from the shape of a model what training it takes of a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from lib.core import units
from lib.models.architecture import decoder_layers

GPUS = (1, 8, 64)
_STATE = 16  # bytes per parameter: float32 weight, gradient, and AdamW's two moments
_COMPUTE = 2  # bytes of a number in bf16
_LONGEST = 1024  # stage 04's default for --seq-length
# Bytes kept for the backward pass, per token and feature of a layer; counted in bf16 with sdpa,
# which keeps no attention matrix (transformers 5.23): 46 to 53 for the shapes of Llama, 32 for
# GPT-NeoX, 43 for Falcon, 114 for GPT-2 with its dropout. The 34 of Korthikanti et al. 2022
# (arXiv:2205.05198) leave out what RMSNorm and RoPE do in float32, and the third matrix of SwiGLU.
_PER_FEATURE = 50
_PER_LOGIT = 14  # bf16 logits; in float32 the copy, its softmax and its gradient


@dataclass(frozen=True)
class Estimate:
    """Says what each GPU needs. tokens: of its one sequence. per_gpu: bytes, by number of GPUs."""

    tokens: int
    per_gpu: dict[int, int]

    def text(self) -> str:
        """Return the figures in words."""
        *shown, last = [f"{units.memory(size)} on {gpus}" for gpus, size in self.per_gpu.items()]
        return f"about {', '.join(shown)} or {last} GPUs, each with 1 × {self.tokens:,} tokens:"

    def notes(self) -> list[str]:
        """Return what the figures cover."""
        return [f"float32 weights, gradients and AdamW moments ({_STATE} bytes per "
                "parameter, sharded), two gathered blocks",
                f"and the output layer in bf16, activations of {_PER_FEATURE} bytes per token, "
                "feature and layer, logits; not CUDA itself"]


def estimate(model: PreTrainedModel) -> Estimate:
    """Return the estimate for full training in bf16 with float32 masters, without recomputation."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or _LONGEST
    tokens = min(context, _LONGEST)
    beside, states = sum(beside_states(model, tokens, "bf16")), _STATE * _count(model)
    return Estimate(tokens, {n: -(-states // n) + beside for n in GPUS})


def beside_states(model: PreTrainedModel, tokens: int, precision: str) -> tuple[int, int]:
    """Return the bytes of activations, and of gathered weights, in a pass of so many tokens."""
    blocks = list(decoder_layers(model).values())
    largest = max(map(_count, blocks), default=0)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows, features = embedding.weight.shape
    wider = 2 if precision == "fp32" else 1
    # A block, the one fetched ahead, and the gradients of one; weights and gradients of the head.
    gathered = wider * _COMPUTE * (3 * largest + 2 * _count(head or embedding))
    kept = wider * tokens * (_PER_FEATURE * features * len(blocks) + _PER_LOGIT * rows)
    return kept, gathered


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
