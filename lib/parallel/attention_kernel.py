"""Pick the kernel that computes attention: FlashAttention 3 if installed, else torch's choice.

FlashAttention 3 replaces torch's own FlashAttention 2 only if both give the same results, forward
and backward, on heads like those of the model.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from transformers import AttentionInterface, PretrainedConfig

from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import attention

_MODULE = "flash_attn_interface"  # of the package flash_attn_3; torch imports it by this name
_LENGTH = 256  # tokens of the row on which a kernel is tried
_TOLERANCE = 0.02  # of the norm; different ways of rounding to half precision differ by less
_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention 2 of torch",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.MATH: "matrix products, which is slow",
}
_OTHERS = {
    "flash_attention_2": "flash_attention_2, by the package flash_attn",
    "flex_attention": "flex, compiled by torch",
    "eager": "eager, by matrix products, which is slow",
}


def pick_attention_kernel(
    model: nn.Module, packing: str, precision: str, device: torch.device
) -> str:
    """Activate the fastest attention kernel for a model; return its name and the reason."""
    config = model.config.get_text_config()
    name = config._attn_implementation
    by_mask = packing == "documents" and name == "sdpa"
    label = "sdpa with a mask" if by_mask else name
    if name in _OTHERS:
        return _OTHERS[name]
    if device.type != "cuda":
        return f"{label}, by torch's " + (
            "kernel for CPUs" if name == "sdpa" else "kernel for CPUs, document by document"
        )
    heads = _make_heads(config, COMPUTE_DTYPES[precision], device)
    if not heads:
        return label
    backend = (
        SDPBackend.FLASH_ATTENTION
        if name == attention.VARLEN
        else _find_torch_backend(heads, by_mask)
    )
    if by_mask:
        problem = attention.varlen_problem(precision, config)
        return f"{label}, by {_KERNELS[backend]}" + (
            f", since {problem}; that is several times slower" if problem else ""
        )
    if backend not in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        return f"{label}, by {_KERNELS[backend]}"
    problem = _flash_3_problem(config, device) or activate_flash_3(name, heads)
    if problem:
        return f"{label}, by {_KERNELS[backend]} ({problem})"
    if name == "sdpa":
        _prefer_flash()
    return f"{label}, by FlashAttention 3 of flash_attn_3"


def activate_flash_3(name: str, heads: list[Tensor]) -> str:
    """Replace FlashAttention 2 by 3 if the results agree; return the reason if not, or "".

    name: sdpa or varlen. heads: queries [1, H, T, D], keys and values, all with gradients.
    """
    try:
        expected = _compute_attention(name, heads)
        activate_flash_attention_impl("FA3")
        pairs = zip(_compute_attention(name, heads), expected, strict=True)
        largest = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        if largest < _TOLERANCE:
            return ""
        failure = f"its results differ by {largest:.2g} of their norm"
    except Exception as error:  # another build, CUDA or torch may raise anything
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if current_flash_attention_impl():
        restore_flash_attention_impl()
    return f"FlashAttention 3 fails here: {failure}"


def _make_heads(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return random queries, keys and values like a model's: [1, H or fewer, T, D].

    The list is empty if the config does not contain the number and size of the heads.
    """
    sizes = attention.find_head_sizes(config)
    count = attention.get_field(config, "num_attention_heads")
    shared = attention.get_field(config, "num_key_value_heads") or count
    if not sizes.query or not isinstance(shared, int) or count % shared:
        return []
    # A generator of its own, because the random state that dropout uses must not change.
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            1,
            heads,
            _LENGTH,
            size,
            device=device,
            dtype=dtype,
            generator=generator,
            requires_grad=True,
        )
        for heads, size in ((count, sizes.query), (shared, sizes.query), (shared, sizes.value))
    ]


def _find_torch_backend(heads: list[Tensor], by_mask: bool) -> SDPBackend:
    """Return the kernel that torch picks by itself for sdpa. by_mask: the call passes a mask."""
    query, key, value = heads
    groups = query.shape[1] // key.shape[1]
    mask = None
    if by_mask:  # with a mask, transformers repeats keys and values
        mask = query.new_ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool)
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return SDPBackend(
        torch._fused_sdp_choice(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=not by_mask,
            enable_gqa=groups > 1 and not by_mask,
        )
    )


def _flash_3_problem(config: PretrainedConfig, device: torch.device) -> str:
    """Return why FlashAttention 3 cannot be used, or "" if it can be tried."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention 3 needs compute capability 9.0"
    if not find_spec(_MODULE):
        return "flash_attn_3 is not installed"
    if "FA3" not in list_flash_attention_impls():
        return "this torch does not support FlashAttention 3"
    if torch.are_deterministic_algorithms_enabled():
        return "--deterministic on rules out FlashAttention 3"
    if attention.has_dropout(config):
        return "FlashAttention 3 does not support the dropout of this model"
    return ""


def _compute_attention(name: str, heads: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of attention, computed by FlashAttention."""
    attend = AttentionInterface()[name]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "sdpa" else nullcontext():
        if name == "sdpa":
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        else:
            out, _ = attend(None, *heads, None)
        gradients = torch.autograd.grad(out.float().square().sum(), heads)
    return [part.detach().float() for part in (out, *gradients)]


def _prefer_flash() -> None:
    """Let sdpa prefer FlashAttention; on this GPU, torch itself prefers cuDNN.

    Attention with a mask still uses the next kernel that supports masks.
    """
    flash = int(SDPBackend.FLASH_ATTENTION)
    order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(sorted(order, key=lambda kernel: kernel != flash))
