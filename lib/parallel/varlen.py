"""Compute attention within packed documents, as a function of transformers' interface.

`varlen` is torch's kernel for packed documents, registered under that name in the attention
interface of transformers. torch has no such kernel for CPUs; there, `varlen` computes one document
at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from lib.core import commands
from lib.core.errors import UsageError

VARLEN = "varlen"
_ALIGNMENT = 8  # of the size of a head

# A kernel for packed documents. It takes queries and keys [tokens, H, D], values [tokens, H, V],
# the boundaries of documents among the queries and among the keys, a length that no document
# exceeds, the factor of scores, and how many tokens each token sees (0: all before it). A document
# may have fewer queries than keys: its last ones. The result is [tokens, H, V]. Keys may have fewer
# heads.
PackedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float, int], Tensor]


def row_ends(rows: int, length: int, device: torch.device) -> Tensor:
    """Return where the rows of a batch begin and end, int32 [B + 1]."""
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)


def attend_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention within documents, as a function of transformers' interface.

    query: [B, H, T, D]; key, value: [B, H or fewer, T, D]. cu_seq_lens_q: int32 [documents + 1],
    the boundaries of documents in the B·T tokens; None if each row is one document. cu_seq_lens_k:
    the same among the keys, if there are more keys than queries. max_length_q: the most tokens of a
    document (None: T); the kernel would ignore further tokens of a longer one. Returns
    [B, T, H, D]. Raises UsageError for dropout, caps and sinks, which the kernel lacks.
    """
    if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
        raise UsageError(
            "--attention varlen supports no dropout, cap or sink of attention; this model has one",
            run=commands.as_typed("--attention", "sdpa"),
        )
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_k = cu_seq_lens_q = row_ends(batch, length, query.device)
    longest = length if max_length_q is None else max_length_q
    # Compare with the row: a comparison with `longest` would compile a graph for each length.
    window = sliding_window if sliding_window and sliding_window < key.shape[2] else 0
    ends = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
    query, key, value = (
        part.transpose(1, 2).flatten(0, 1)  # [B·T, H, D]
        for part in (query, key, value)
    )
    if query.is_cuda:
        out = attend_by_kernel(query, key, value, *ends, longest, scaling, window)
    else:
        out = attend_by_document(query, key, value, *ends, longest, scaling, window)
    return out.unflatten(0, (batch, length)), None


def group_arguments(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the argument that lets a kernel use fewer key heads than query heads.

    In torch 2.11 the argument is missing, and the kernel allows fewer heads anyway.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


_GROUPS = group_arguments(varlen_attn)  # computed here because `attend_by_kernel` is traced


def call_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Compute attention within each document with torch's kernel; see `PackedKernel`.

    The kernel needs heads of one size, a multiple of eight. Other heads are padded with zeros,
    which add nothing to a score.
    """
    width = max(query.shape[-1], value.shape[-1])
    width += -width % _ALIGNMENT
    parts = [
        F.pad(part, (0, width - part.shape[-1])) if part.shape[-1] < width else part
        for part in (query, key, value)
    ]
    out = varlen_attn(
        *parts,
        query_ends,
        key_ends,
        longest,
        longest,
        scale=scale,
        window_size=(window - 1, 0) if window else (-1, 0),
        **_GROUPS,
    )
    return out[..., : value.shape[-1]]


_packed_kernel: PackedKernel = call_torch


def use_packed_kernel(kernel: PackedKernel | None) -> None:
    """Set the kernel that `varlen` uses on a GPU; None: torch's. Models are compiled after it."""
    global _packed_kernel
    _packed_kernel = kernel or call_torch


def attend_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Compute attention within each document with the GPU's kernel; see `PackedKernel`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _packed_kernel(query, key, value, query_ends, key_ends, longest, scaling, window)


@torch.compiler.disable  # otherwise each division of a row into documents would be compiled
def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Compute attention for one document after another; see `PackedKernel`.

    Raises AssertionError for a document longer than `longest`. The GPU kernel would silently ignore
    the end of such a document.
    """
    outputs = []
    documents = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (first, last), (first_key, last_key) in documents:
        seen = last_key - first_key
        assert seen <= longest, f"a document of {seen} tokens, more than {longest}"
        if first == last:
            continue
        keys = slice(first_key, last_key)
        parts = [part.transpose(0, 1)[None] for part in (query[first:last], key[keys], value[keys])]
        mask = None
        if seen > last - first or (window and seen > window):
            positions = torch.arange(seen)
            distance = positions[seen - (last - first) :, None] - positions
            mask = (distance >= 0) & (distance < (window or seen))
        out = F.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


# There is no entry in AttentionMaskInterface, so transformers makes no mask for it.
AttentionInterface.register(VARLEN, attend_varlen)
