"""Compute the bytes of states, gathered weights and checkpoints from the shapes of parameters.

Activations are only estimated here; trace.py traces them.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lib.models.architecture import decoder_layers
from lib.models.tensors import COMPUTE_DTYPES
from lib.optim.optimizers import Choice
from lib.parallel import placement
from lib.planning.tracker import SHARDED, Bytes

_FLOAT32 = 4  # bytes
_BFLOAT16 = 2
# Bytes kept for the backward pass, per token and feature of a layer; counted in bf16 with sdpa,
# which keeps no attention matrix (transformers 5.23): 46 to 53 for the shapes of Llama, 32 for
# GPT-NeoX, 43 for Falcon, 114 for GPT-2 with its dropout. The 34 of Korthikanti et al. 2022
# (arXiv:2205.05198) omit what RMSNorm and RoPE do in float32, and the third matrix of SwiGLU.
_PER_FEATURE = 50
_PER_LOGIT = 14  # bytes: the logit in bf16; its copy, softmax and gradient in float32


def count_states(model: PreTrainedModel, optimizer: Choice, shard_size: int) -> Bytes:
    """Return the bytes of a rank's weights, gradients and optimizer states.

    They are means over the ranks. Frozen weights have neither gradients nor states.
    """
    count_ranks = placement.count_ranks_in(shard_size)
    totals: dict[int, Bytes] = {}  # by the number of ranks that share the parameters
    for name, p in model.named_parameters():
        trained = p.numel() if p.requires_grad else 0
        total = totals.setdefault(count_ranks(name, p.shape), dict.fromkeys(SHARDED, 0))
        total["parameters"] += p.numel() * p.element_size()
        total["gradients"] += _FLOAT32 * trained
        total["optimizer"] += optimizer.state_bytes(name, p.shape) if trained else 0
    return {
        kind: round(sum(total[kind] / ranks for ranks, total in totals.items())) for kind in SHARDED
    }


def count_checkpoint(model: PreTrainedModel, optimizer: Choice, shard_size: int = 1) -> int:
    """Return the bytes of a checkpoint: float32 masters and states of the trained parameters.

    shard_size: ranks that share a parameter. The result is the mean share of a rank; with 1, it is
    the whole checkpoint.
    """
    states = count_states(model, optimizer, shard_size)
    return states["gradients"] + states["optimizer"]  # masters are as large as gradients


def count_gathered(model: PreTrainedModel, shard_size: int, precision: str) -> int:
    """Return the bytes of all weights that FSDP gathers, in the compute dtype.

    Frozen weights that each rank contains completely are not gathered.
    """
    count_ranks = placement.count_ranks_in(shard_size)
    return COMPUTE_DTYPES[precision].itemsize * sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.requires_grad or count_ranks(name, p.shape) > 1
    )


def estimate_activations(model: PreTrainedModel, tokens: int, precision: str) -> tuple[int, int]:
    """Estimate the bytes of activations and of gathered weights from the shape of a model.

    tokens: number of tokens in a micro-batch on a device.
    """
    blocks = list(decoder_layers(model).values())
    largest = max(map(_count_parameters, blocks), default=0)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows, features = embedding.weight.shape
    wider = 2 if precision == "fp32" else 1
    # One block, the next one prefetched, the gradients of one; weights and gradients of the head.
    gathered = wider * _BFLOAT16 * (3 * largest + 2 * _count_parameters(head or embedding))
    activations = wider * tokens * (_PER_FEATURE * features * len(blocks) + _PER_LOGIT * rows)
    return activations, gathered


def count_least_activations(model: PreTrainedModel, tokens: int, offloaded: bool = False) -> int:
    """Return the bytes of the blocks' inputs, which a step keeps whatever it recomputes.

    tokens: number of tokens in a micro-batch on a device. offloaded: without the inputs that
    --activation-offload moves to host memory.
    """
    features = model.get_input_embeddings().weight.shape[1]
    blocks = len(decoder_layers(model))
    return _BFLOAT16 * tokens * features * max(1, min(blocks, 2) if offloaded else blocks)


def count_offloaded(model: PreTrainedModel, tokens: int, precision: str) -> int:
    """Return the bytes of host memory that --activation-offload takes on a rank.

    These are the inputs of all blocks but the last one. tokens: number of tokens in a micro-batch
    on a device.
    """
    features = model.get_input_embeddings().weight.shape[1]
    blocks = len(decoder_layers(model)) - 1
    return COMPUTE_DTYPES[precision].itemsize * tokens * features * blocks


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
