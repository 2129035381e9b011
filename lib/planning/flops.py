"""Floating-point operations of the model and of the device, for TFLOP/s and MFU."""

from __future__ import annotations

import re
import time

import torch
from torch import nn

from lib.models.tensors import COMPUTE_DTYPES

# Dense bf16/fp16 tensor-core peaks without sparsity, summed in float32, in FLOP/s, from the
# vendors' data sheets. The names are words of what the driver calls a GPU.
_PEAKS = {
    "GB300": 2500e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "RTX PRO 6000": 503.8e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_MIG = re.compile(r"\bMIG (\d)g\b")  # a part of a GPU, in sevenths
_SIZE = {"cuda": 8192, "cpu": 1024}  # of products that are timed: large enough to reach the peak
_PLANNED_FOR = "H100"
_FP32 = 67e12  # of it, without tensor cores


def usual_gpu(precision: str) -> tuple[float, str]:
    """Return the FLOP/s of the GPU that plans are for, and its name."""
    return _FP32 if precision == "fp32" else _PEAKS[_PLANNED_FOR], _PLANNED_FOR


def per_token(model: nn.Module, seq_length: int) -> float:
    """Return the FLOPs of forward and backward per trained token.

    6 N + 12 L H Q T of Chowdhery et al. 2022 ("PaLM", appendix B): N the parameters that take
    part in a matrix product for a token (of experts, only the chosen), L layers, H heads of size
    Q, T the sequence length. Of frozen parameters it is 4 N: their gradients are not computed. The
    whole square of attention is counted, as most do, though a causal model computes half of it; see
    `causal`.
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
    return products + _attention(model, seq_length)


def causal(model: nn.Module, seq_length: int) -> float:
    """Return the same with the half of attention that a causal model computes."""
    return per_token(model, seq_length) - _attention(model, seq_length) / 2


def described(model: nn.Module, seq_length: int) -> str:
    """Say what a token takes, by both counts."""
    return (
        f"{per_token(model, seq_length) / 1e9:.4g} GFLOP per token with the whole square of "
        f"attention, {causal(model, seq_length) / 1e9:.4g} with its causal half"
    )


def _attention(model: nn.Module, seq_length: int) -> float:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 12 * config.num_hidden_layers * heads * head_size * seq_length


def device_peak(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the FLOP/s that this rank's device can reach at most, and where that is from.

    Known GPUs: their data sheet. Others and CPUs: a matrix product, timed now. Of fp8 it is the
    peak in bf16: the same work has the same MFU, whatever it is done in.
    """
    if device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        if peak := listed_peak(name):
            return peak, f"data sheet of {name}" + (", for bf16" if precision == "fp8" else "")
    # Both, since a CPU without hardware for half precision is faster in float32.
    measured = max(_measure(device, kind) for kind in {precision, "fp32"})
    return measured, "the best of timed matrix products"


def listed_peak(name: str) -> float | None:
    """Return the FLOP/s of a GPU, or of a part of one (MIG), by its name; None for an unknown."""
    known = [listed for listed in _PEAKS if re.search(rf"\b{listed}\b", name)]
    if not known:
        return None
    part = _MIG.search(name)
    return _PEAKS[max(known, key=len)] * (int(part[1]) / 7 if part else 1.0)


def _measure(device: torch.device, precision: str) -> float:
    size = _SIZE[device.type]
    # No random numbers: drawing some would move the state that dropout goes on from.
    a = torch.ones(size, size, device=device, dtype=COMPUTE_DTYPES[precision])
    best = float("inf")
    for _ in range(6):  # the first one warms up and is seldom the best
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
