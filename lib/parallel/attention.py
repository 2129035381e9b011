"""Attention over packed documents: which implementation, and what it has to be told.

`varlen` is torch's own kernel for rows of documents, under the name that transformers' attention
interface knows it by here. On a CPU, which has no such kernel, it goes document by document.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lib.core import commands, log
from lib.core.errors import UsageError
from lib.tokens.loader import MicroBatch

_VARLEN = "varlen"
CAUSAL = "causal"  # sdpa for rows of one document each, which need no mask
_BY_BOUNDARIES = (_VARLEN, "flash_attention_2")  # told where documents end, instead of a mask


def choose(wanted: str, packing: str, precision: str) -> str:
    """Return the name in transformers' attention interface for --attention.

    auto: sdpa for windows (it takes the fastest causal kernel there is); varlen for packed
    documents on a GPU, where a mask would rule out the fast kernels, if the GPU and the precision
    have that kernel. Raises UsageError for what cannot train here.
    """
    on_gpu = torch.cuda.is_available()
    if wanted == "flex" and not on_gpu:
        raise UsageError("--attention flex cannot train on a CPU",
                         run=commands.again("--attention", "sdpa"))
    lacks = _lacks_kernel(precision) if on_gpu else ""
    if wanted == _VARLEN and lacks:
        raise UsageError("--attention varlen cannot train here", found=lacks,
                         run=commands.again("--attention", "sdpa"))
    if wanted == "auto":
        if lacks and packing == "documents":
            log.info(f"attention: sdpa with a mask, since {lacks}; that is several times slower")
        return _VARLEN if packing == "documents" and on_gpu and not lacks else "sdpa"
    return {"flex": "flex_attention"}.get(wanted, wanted)


def _lacks_kernel(precision: str) -> str:
    """Say why the kernel for rows of documents cannot run on this GPU; empty where it can."""
    if precision == "fp32":
        return "the kernel for packed documents takes no fp32"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than what the kernel for packed " \
               "documents needs (compute capability 8.0)"
    return ""


def inputs(model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model for a micro-batch.

    Without a mask, and with positions that restart, transformers keeps documents apart.
    """
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        arguments["position_ids"] = batch.position_ids
        if model.config._attn_implementation in _BY_BOUNDARIES:
            # The longest document may be as long as a row: no number that changes by the batch.
            longest = batch.input_ids.shape[1]
            arguments |= {"cu_seq_lens_q": batch.boundaries, "cu_seq_lens_k": batch.boundaries,
                          "max_length_q": longest, "max_length_k": longest}
    return arguments


def _varlen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
            sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
            **others: Any) -> tuple[Tensor, None]:
    """Attend within documents. query: [B, H, T, D]; key, value: [B, H or fewer, T, D].

    cu_seq_lens_q: int32 [documents + 1], where they begin and end in the B·T tokens; None: a row
    is one. Returns [B, T, H, D]. Raises UsageError for what the kernel does not know.
    """
    if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
        raise UsageError("--attention varlen knows no dropout, cap or sink of attention, which "
                         "this model has", run=commands.again("--attention", "sdpa"))
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, batch * length + 1, length, dtype=torch.int32,
                                     device=query.device)
    window = sliding_window if sliding_window and sliding_window < length else 0
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # [B·T, H, D]
    if query.is_cuda:
        out = _by_kernel(*flat, cu_seq_lens_q, length, scaling, window)
    else:
        out = _by_document(*flat, cu_seq_lens_q, scaling, window)
    return out.unflatten(0, (batch, length)), None


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int,
               scaling: float | None, window: int) -> Tensor:
    """Attend within each document by torch's kernel. query, key, value: [B·T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no word for fewer heads of keys than of queries, and the kernel takes them.
    has_word = "enable_gqa" in inspect.signature(varlen_attn).parameters
    groups = {"enable_gqa": True} if has_word else {}
    return varlen_attn(query, key, value, boundaries, boundaries, longest, longest, scale=scaling,
                       window_size=(window - 1, 0) if window else (-1, 0), **groups)


@torch.compiler.disable  # or each way in which documents share a row were compiled anew
def _by_document(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor,
                 scaling: float | None, window: int) -> Tensor:
    """Attend within each document by itself. query, key, value: [B·T, H, D]."""
    done = []
    for first, last in pairwise(boundaries.unique().tolist()):  # without the empty ones
        parts = [part[first:last].transpose(0, 1)[None] for part in (query, key, value)]
        mask = None
        if window and last - first > window:
            at = torch.arange(last - first)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None,
                                             scale=scaling, enable_gqa=True)
        done.append(out[0].transpose(0, 1))
    return torch.cat(done)


def _causal(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Tensor | None, **others: Any) -> tuple[Tensor, None]:
    """Attend as sdpa does without a mask."""
    return sdpa_attention_forward(module, query, key, value, None, **others)


# Neither has an entry in AttentionMaskInterface: transformers makes no mask then, and does not ask
# the device on the way whether the positions are those of packed documents.
AttentionInterface.register(_VARLEN, _varlen)
AttentionInterface.register(CAUSAL, _causal)
