"""Pick the kernel that computes attention: FlashAttention 4 or 3 if installed, else torch's choice.

They replace torch's own FlashAttention 2 only if the results agree, forward and backward, on heads
like those of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from transformers import AttentionInterface, PretrainedConfig

from lib.core import commands
from lib.models.architecture import has_attention
from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import attention, flash_4, varlen

_LENGTH = 256  # tokens of the row on which a kernel is tried
_BOUNDARIES = (0, 100, 100, 101, _LENGTH)  # of its documents; one is empty, as padding can be
_WINDOW = 40  # tokens that each token sees in a further trial, if the model has sliding windows
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


class FlashKernel(NamedTuple):
    """A version of FlashAttention that can replace version 2, which is part of torch.

    package: its name in the log. majors: the compute capabilities that it has kernels for.
    find_version: returns the installed version, "" if it is unknown, None if there is none.
    describe_missing: returns what to say if it is not installed. activate: makes this process use
    it, until `restore_flash_2`.
    """

    name: str
    package: str
    majors: tuple[int, ...]
    find_version: Callable[[], str | None]
    describe_missing: Callable[[], str]
    activate: Callable[[], None]


def _find_flash_3() -> str | None:
    """Return "" if the package is installed, else None; torch imports it by this name."""
    return "" if find_spec("flash_attn_interface") else None


def _find_flash_4() -> str | None:
    """Return the installed version, None if there is none; its module may be of another package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(flash_4.PACKAGES[0])
    return None


def _describe_missing_flash_4() -> str:
    command = commands.pip_install_optional(*flash_4.PACKAGES)
    return (
        f"FlashAttention 4, which is made for this GPU, is not installed; to install it: {command}"
    )


FLASH_3 = FlashKernel(
    "FlashAttention 3",
    "flash_attn_3",
    (9,),
    _find_flash_3,
    lambda: "flash_attn_3 is not installed",
    partial(activate_flash_attention_impl, "FA3"),
)
FLASH_4 = FlashKernel(
    "FlashAttention 4",
    "flash-attn-4",
    (9, 10, 11),
    _find_flash_4,
    _describe_missing_flash_4,
    partial(varlen.use_packed_kernel, flash_4.attend),
)
# The versions that packed documents use, the fastest first; torch's version 2 is the last resort.
# On one H200, version 2 reached 276 TFLOP/s with heads of 128 and 242 with heads of 64, where cuDNN
# reached 500 and 378 on whole rows. Versions 3 and 4 have not been measured here. Upstream found
# them about equal on a GH200; 4 comes first, because it also supports Blackwell and exists as a
# wheel. The item `attention` of benchmarks/gpu.py measures these versions, cuDNN and flex.
PACKED_KERNELS = (FLASH_4, FLASH_3)


def pick_attention_kernel(
    model: nn.Module, packing: str, precision: str, device: torch.device, seq_length: int
) -> str:
    """Activate the fastest attention kernel for a model; return its name and the reason.

    The result also names the kernel of layers with a sliding window, if that is another one.
    """
    config = model.config.get_text_config()
    name = config._attn_implementation
    by_mask = packing == "documents" and name == "sdpa"
    label = "sdpa with a mask" if by_mask else name
    if not has_attention(config):
        return "none in this family"
    if name in _OTHERS:
        return _OTHERS[name]
    if device.type != "cuda":
        return f"{label}, by torch's " + (
            "kernel for CPUs" if name == "sdpa" else "kernel for CPUs, document by document"
        )
    heads = _make_heads(config, COMPUTE_DTYPES[precision], device)
    if not heads:
        return label
    if name == varlen.VARLEN:
        return f"{label}, by {_pick_packed_kernel(config, heads, device)}"
    backend = _find_torch_backend(heads, by_mask)
    if by_mask:
        problem = attention.varlen_problem(precision, config)
        return f"{label}, by {_KERNELS[backend]}" + (
            f", since {problem}; that is several times slower" if problem else ""
        )
    if backend not in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        return f"{label}, by {_KERNELS[backend]}"
    masked = ""
    window = attention.get_field(config, "sliding_window")
    if isinstance(window, int) and window <= seq_length:
        other = _KERNELS[_find_torch_backend(heads, by_mask=True)]
        masked = f"; layers with a window of {window:,} tokens use a mask, by {other}"
    if problem := _find_problem(FLASH_3, config, device) or activate(FLASH_3, name, heads):
        return f"{label}, by {_KERNELS[backend]} ({problem}){masked}"
    _prefer_flash()
    return f"{label}, by {FLASH_3.name} of {FLASH_3.package}{masked}"


def _pick_packed_kernel(config: PretrainedConfig, heads: list[Tensor], device: torch.device) -> str:
    """Activate the fastest kernel for packed documents; return its name and the reason.

    If a faster one is missing, the reason contains the command that installs it.
    """
    windows = (0, _WINDOW) if attention.get_field(config, "sliding_window") else (0,)
    reasons: list[str] = []
    for kernel in PACKED_KERNELS:
        if problem := _find_problem(kernel, config, device):
            reasons += [] if reasons else [problem]  # of slower versions only failures matter
        elif failure := activate(kernel, varlen.VARLEN, heads, windows):
            reasons.append(failure)
        else:
            name = f"{kernel.name} of {kernel.package} {kernel.find_version()}".rstrip()
            return name + (f" ({'; '.join(reasons)})" if reasons else "")
    return f"{_KERNELS[SDPBackend.FLASH_ATTENTION]} ({'; '.join(reasons)})"


def _find_problem(kernel: FlashKernel, config: PretrainedConfig, device: torch.device) -> str:
    """Return why a version of FlashAttention cannot be used, or "" if it can be tried."""
    if torch.cuda.get_device_capability(device)[0] not in kernel.majors:
        supported = " or ".join(f"{major}.x" for major in kernel.majors)
        return f"{kernel.name} needs compute capability {supported}"
    if torch.are_deterministic_algorithms_enabled():  # torch itself then avoids cuDNN too
        return f"--deterministic on rules out cuDNN and {kernel.name}"
    if attention.has_dropout(config):
        return f"{kernel.name} does not support the dropout of this model"
    if kernel.find_version() is None:
        return kernel.describe_missing()
    return ""


def activate(
    kernel: FlashKernel, name: str, heads: list[Tensor], windows: Sequence[int] = (0,)
) -> str:
    """Replace FlashAttention 2 by another version if the results agree; return the reason if not.

    name: sdpa or varlen. heads: queries [1, H, T, D], keys and values, all with gradients. windows:
    numbers of tokens that each token sees, 0 for all; all are tried.
    """
    restore_flash_2()  # another kernel may be active
    try:
        expected = [_compute_attention(name, heads, window) for window in windows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler of version 4 warns about its own code
            kernel.activate()
            results = [_compute_attention(name, heads, window) for window in windows]
        differences = [
            ((part - reference).norm() / reference.norm()).item()
            for pair in zip(results, expected, strict=True)
            for part, reference in zip(*pair, strict=True)
        ]
        wrong = [difference for difference in differences if not difference < _TOLERANCE]  # or NaN
        if not wrong:
            return ""
        failure = f"its results differ by {wrong[0]:.2g} of their norm"
    except Exception as error:  # another build, CUDA or torch may raise anything
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    restore_flash_2()
    return f"{kernel.name} fails here: {failure}"


def restore_flash_2() -> None:
    """Let torch compute attention by its own FlashAttention 2 again."""
    if current_flash_attention_impl():
        restore_flash_attention_impl()
    varlen.use_packed_kernel(None)


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


def _compute_attention(name: str, heads: list[Tensor], window: int) -> list[Tensor]:
    """Return the output and the gradients of attention, computed by FlashAttention.

    For varlen, the row consists of several documents.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "sdpa" else nullcontext():
        if name == "sdpa":
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        else:
            out, _ = AttentionInterface()[name](
                None,
                *heads,
                None,
                sliding_window=window or None,
                cu_seq_lens_q=torch.tensor(_BOUNDARIES, dtype=torch.int32, device=heads[0].device),
            )
        gradients = torch.autograd.grad(out.float().square().sum(), heads)
    return [part.detach().float() for part in (out, *gradients)]


def _prefer_flash() -> None:
    """Let sdpa prefer FlashAttention; on this GPU, torch itself prefers cuDNN.

    Attention with a mask still uses the next kernel that supports masks.
    """
    flash = int(SDPBackend.FLASH_ATTENTION)
    order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(sorted(order, key=lambda kernel: kernel != flash))
