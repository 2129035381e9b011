"""Count the floating-point operations of a model, and find the peak of this GPU, for MFU."""

from __future__ import annotations

import time

import torch
from torch import nn

from lib.models.options import FLOAT8_RECIPES
from lib.models.tensors import COMPUTE_DTYPES
from lib.planning import peaks

_SIZE = 8192  # rows and columns of the matrices whose product is timed, enough to reach the peak


def count_per_token(model: nn.Module, seq_length: int) -> float:
    """Return the FLOPs of forward and backward per trained token.

    6 N + 12 L H Q T of Chowdhery et al. 2022 ("PaLM", appendix B): N the parameters that take
    part in a matrix product for a token (of experts, only the chosen), L layers, H heads of size
    Q, T the sequence length. For frozen parameters it is 4 N: their gradients are not computed. All
    pairs of tokens count in attention, as is usual, though a causal model computes half of them;
    see `count_causal`. Packed documents have fewer pairs, see lib/train/output/rows.py.
    """
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    products = 0.0
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    for name, parameter in model.named_parameters():
        share = chosen / experts if chosen and experts and ".experts." in name else 1.0
        if parameter is not embedding or tied:
            products += (6 if parameter.requires_grad else 4) * parameter.numel() * share
    return products + count_attention(model, seq_length)


def count_causal(model: nn.Module, seq_length: int) -> float:
    """Return the FLOPs per trained token with only the causal half of attention."""
    return count_per_token(model, seq_length) - count_attention(model, seq_length) / 2


def describe_per_token(model: nn.Module, seq_length: int) -> str:
    """Return a text with both counts of FLOPs per token."""
    return (
        f"{count_per_token(model, seq_length) / 1e9:.4g} GFLOP per token with attention counted as "
        f"full, {count_causal(model, seq_length) / 1e9:.4g} as causal"
    )


def count_attention(model: nn.Module, seq_length: int) -> float:
    """Return the FLOPs per trained token between all pairs of tokens of a sample."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 12 * config.num_hidden_layers * heads * head_size * seq_length


def find_peak(precision: str) -> tuple[float, str]:
    """Return the peak of this rank's GPU in FLOP/s, and the source of that number.

    For known GPUs the source is the data sheet, otherwise a matrix product that is timed now. For
    fp8 this is the peak in bf16, so that MFU can be compared between precisions.
    """
    if precision != "fp32":
        name = torch.cuda.get_device_name()
        if peak := peaks.find_listed_peak(name):
            return peak, f"data sheet of {name}" + (
                ", for bf16" if precision in FLOAT8_RECIPES else ""
            )
    return max(_measure_peak(kind) for kind in {precision, "fp32"}), "the best of timed products"


def _measure_peak(precision: str) -> float:
    """Return the FLOP/s of the fastest of six matrix products."""
    # Not random numbers: drawing them would advance the random state that dropout uses.
    a = torch.ones(_SIZE, _SIZE, device="cuda", dtype=COMPUTE_DTYPES[precision])
    best = float("inf")
    for _ in range(6):  # the first one warms up and is seldom the best
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best
