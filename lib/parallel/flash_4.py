"""FlashAttention 4 for packed documents: the kernels of the package flash-attn-4 as an operator.

torch can activate the package too, but then packed documents cannot be trained. torch 2.11 passes a
window to a backward pass that refuses windows, and torch 2.13 expects two results from a function
that returns four or five. As an operator, the kernels also run inside compiled blocks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Of requirements-optional.txt. The second and third compile the kernels, and each release of theirs
# may break them.
PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
_MODULE = "flash_attn.cute.interface"
_ALIGNMENT = 8  # of the size of a head


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Compute attention within each document; see `varlen.PackedKernel`.

    Heads of other sizes than multiples of eight are padded with zeros, which add nothing to a
    score. Those of keys and values may differ.
    """
    parts = [
        F.pad(part, (0, -part.shape[-1] % _ALIGNMENT)) if part.shape[-1] % _ALIGNMENT else part
        for part in (query, key, value)
    ]
    out, _ = _attend(*parts, query_ends, key_ends, longest, scale, window)
    return out[..., : value.shape[-1]]


def _mask(window: int) -> dict[str, Any]:
    """Return the arguments for a causal mask; window: tokens that each token sees, 0 for all."""
    return {
        "causal": not window,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
    }


@torch.library.custom_op(
    "flash_4::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor query_ends, Tensor key_ends, "
    "SymInt longest, float scale, int window) -> (Tensor, Tensor)",
)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, H, V] and the logarithms of the softmax's sums [H, tokens]."""
    out, sums = import_module(_MODULE)._flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        return_lse=True,
        **_mask(window),
    )[:2]
    return out, sums


@torch.library.custom_op(
    "flash_4::gradients",
    mutates_args=(),
    schema="(Tensor upstream, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    "Tensor query_ends, Tensor key_ends, float scale, int window) -> (Tensor, Tensor, Tensor)",
)
def _gradients(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values.

    Without the length of the longest document one compiled kernel serves all lengths.
    """
    of_query, of_key, of_value = import_module(_MODULE)._flash_attn_bwd(
        query,
        key,
        value,
        out,
        upstream,
        sums,
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        softmax_scale=scale,
        **_mask(window),
    )[:3]
    return of_query, of_key, of_value


@_attend.register_fake
def _make_outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query.shape
    return (
        query.new_empty(tokens, heads, value.shape[-1]),
        query.new_empty(heads, tokens, dtype=torch.float32),
    )


@_gradients.register_fake
def _make_gradients(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
    return tuple(torch.empty_like(part) for part in (query, key, value))


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, query_ends, key_ends, _, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, query_ends, key_ends)


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
    gradients = _gradients(upstream, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *gradients, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save_context)
