"""Attention over packed documents: which implementation computes it, and which inputs it needs.

`varlen` is torch's own kernel for rows of documents, under the name that transformers' attention
interface knows it by here. On a CPU, which has no such kernel, it goes document by document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from lib.core import commands, log
from lib.core.errors import UsageError
from lib.tokens.batches import MicroBatch

VARLEN = "varlen"
_FLASH = "flash_attention_2"
_BY_BOUNDARIES = (VARLEN, _FLASH)  # these are given where documents end, instead of a mask
_WIDEST = 256  # numbers per head that the kernel for packed documents takes, a multiple of _ALIGNED
_ALIGNED = 8
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class HeadSizes(NamedTuple):
    """Counts the numbers of a model's widest head; 0 where its config does not say."""

    query: int  # and key
    value: int


def choose(wanted: str, packing: str, precision: str, config: PretrainedConfig) -> str:
    """Return the name in transformers' attention interface for --attention.

    wanted: what the option offers, but for `flash` (see `flash_or_auto`). auto: sdpa for windows
    (it takes the fastest causal kernel there is); varlen for packed documents on a GPU, where a
    mask would rule out the fast kernels, if the GPU, the precision and the model have that kernel.
    Raises UsageError for what cannot train here.
    """
    on_gpu = torch.cuda.is_available()
    if wanted == "flex" and not on_gpu:
        raise UsageError(
            "--attention flex cannot train on a CPU", run=commands.as_typed("--attention", "sdpa")
        )
    lacks = lacks_varlen(precision, config) if on_gpu else ""
    if wanted == VARLEN and lacks:
        raise UsageError(
            "--attention varlen cannot train here",
            found=lacks,
            run=commands.as_typed("--attention", "sdpa"),
        )
    if wanted == _FLASH and (lacks := lacks_flash(precision, config)):
        raise UsageError(
            f"--attention {_FLASH} cannot train here",
            found=lacks,
            run=commands.as_typed("--attention", "flash"),
        )
    if wanted == "auto":
        return VARLEN if packing == "documents" and on_gpu and not lacks else "sdpa"
    return {"flex": "flex_attention"}.get(wanted, wanted)


def flash_or_auto(precision: str, config: PretrainedConfig) -> str:
    """Return what --attention flash stands for here, and say why where that is `auto`."""
    if not (lacks := lacks_flash(precision, config)):
        return _FLASH
    if log.rank() == 0:
        log.info(
            f"attention: {lacks}, so the fastest kernel that there is takes the place of {_FLASH}"
        )
    return "auto"


def lacks_flash(precision: str, config: PretrainedConfig) -> str:
    """Say why the package flash_attn cannot train a model on this GPU; empty where it can."""
    if not torch.cuda.is_available():
        return "there is no GPU for flash_attn"
    if not find_spec("flash_attn"):
        return "the package flash_attn is not installed"
    if precision == "fp32":
        return "flash_attn takes no fp32"
    if torch.cuda.get_device_capability() < (8, 0):
        return (
            f"{torch.cuda.get_device_name()} is older than what flash_attn needs (compute "
            "capability 8.0)"
        )
    if (widest := max(head_sizes(config))) > _WIDEST:
        return f"flash_attn takes {_WIDEST} numbers per head at most, and this model has {widest}"
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    known = getattr(family, "_supports_flash_attn", True)
    return "" if known else f"transformers knows no flash_attn for {config.model_type}"


def lacks_varlen(precision: str, config: PretrainedConfig, any_gpu: bool = False) -> str:
    """Say why the kernel for rows of documents cannot run on this GPU; empty where it can.

    any_gpu: on none there is; nothing is asked of this machine.
    """
    if precision == "fp32":
        return "the kernel for packed documents takes no fp32"
    if has_dropout(config):
        return "the kernel for packed documents knows no dropout, which this model has"
    widest = max(head_sizes(config))
    if widest > _WIDEST:
        return (
            f"the kernel for packed documents takes {_WIDEST} numbers per head at most, and "
            f"this model has {widest}"
        )
    if any_gpu:
        return ""
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if capability < (8, 0):
        return (
            f"{name} is older than what the kernel for packed documents needs (compute "
            "capability 8.0)"
        )
    if 192 < widest <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        return f"{name} has no backward kernel for packed documents with {widest} numbers per head"
    return ""


def has_dropout(config: PretrainedConfig) -> bool:
    """Tell whether a model drops parts of its attention while it trains."""
    text = config.get_text_config()
    return any(number_in(text, name) for name in _DROPOUTS)


def number_in(config: PretrainedConfig, name: str) -> Any:
    """Return what a config says under a name; None where it does not, or not for all layers."""
    with suppress(AttributeError, RuntimeError):  # transformers' own, where layers differ
        return getattr(config, name)
    return None


def head_sizes(config: PretrainedConfig) -> HeadSizes:
    """Return how wide the heads of a model are by its config, the widest of all layers."""
    text = config.get_text_config()
    found: dict[str, int] = {}
    _collect_sizes(text.to_dict(), found)
    latent = found.get("qk_nope_head_dim", 0) + found.get("qk_rope_head_dim", 0)
    hidden, heads = (number_in(text, name) for name in ("hidden_size", "num_attention_heads"))
    even = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
    query = latent or found.get("head_dim") or even
    return HeadSizes(query, found.get("v_head_dim") or query)


def _collect_sizes(part: Mapping[Any, Any], found: dict[str, int]) -> None:
    """Note the largest number under each name that ends in head_dim; layers may have their own."""
    for key, value in part.items():
        if isinstance(value, Mapping):
            _collect_sizes(value, found)
        elif str(key).endswith("head_dim") and isinstance(value, int):
            found[key] = max(value, found.get(key, 0))


def ask_no_device(model: nn.Module, packing: str, seq_length: int) -> None:
    """Spare transformers questions to the device in each pass, for whose answers the host waits.

    To make a mask it asks whether documents are packed. Rows of one document need no mask, nor do
    kernels that are given where documents end. For packed documents and a mask the question stays:
    a pass whose rows are one document each then goes without, and fast. Some kinds of RoPE ask how
    far positions go, and GPT-2 asks whether tokens are padding, for a warning.
    """
    if packing != "documents" or model.config._attn_implementation in _BY_BOUNDARIES:
        masking_utils.find_packed_sequence_indices = _unasked
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = _unasked
    settle_rope(model, packing, seq_length)


def settle_rope(model: nn.Module, packing: str, seq_length: int) -> None:
    """Let RoPE that suits its frequencies to the longest position keep those of `seq_length`.

    With packed documents only if short ones have the same.
    """
    for rope in model.modules():
        if getattr(rope, "rope_type", None) not in ("dynamic", "longrope") or not type(
            rope
        ).__module__.startswith("transformers."):
            continue
        frequencies = []
        for last in (0, seq_length - 1):
            rope(rope.inv_freq, torch.tensor([[last]], device=rope.inv_freq.device))
            frequencies.append(rope.inv_freq.clone())
        if packing != "documents" or torch.equal(*frequencies):
            rope.rope_type = "default"


def _unasked(*_: Tensor | None) -> None:
    """Do nothing, in the place of a function of transformers that reads numbers from the device."""


def make_inputs(model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model for a micro-batch.

    Without a mask, and with positions that restart, transformers keeps documents apart. The
    boundaries of documents are marked as dynamic for torch.compile: only the kernel reads them, so
    one graph serves any number of documents (`graphs.prepare` does so for the longest). A copy on
    another device would lose the mark, so the batch must be on the model's device already.
    """
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    implementation = model.config._attn_implementation
    ends = batch.boundaries
    if batch.position_ids is not None:
        arguments["position_ids"] = batch.position_ids
    elif implementation == _FLASH:  # which would ask the device, in each layer, for documents
        ends = _ends_of_rows(batch.input_ids)
    if ends is not None and implementation in _BY_BOUNDARIES:
        if batch.boundaries is not None:
            torch._dynamo.maybe_mark_dynamic(ends, 0)
        longest = batch.longest or batch.input_ids.shape[1]
        arguments |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return arguments


def _ends_of_rows(tokens: Tensor) -> Tensor:
    """Return where the rows of a batch begin and end, as if each were a document. tokens: [B, T]"""
    rows, length = tokens.shape
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=tokens.device)


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within documents. query: [B, H, T, D]; key, value: [B, H or fewer, T, D].

    cu_seq_lens_q: int32 [documents + 1], where they begin and end in the B·T tokens; None: a row
    is one. max_length_q: tokens of the longest document at least, None: T; the kernel would leave
    out what is beyond. Returns [B, T, H, D]. Raises UsageError for what the kernel does not
    support.
    """
    if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
        raise UsageError(
            "--attention varlen knows no dropout, cap or sink of attention, which this model has",
            run=commands.as_typed("--attention", "sdpa"),
        )
    batch, _, length, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = _ends_of_rows(query[:, 0, :, 0])
    longest = length if max_length_q is None else max_length_q
    # Compared with the row: a comparison with the longest document would be compiled apart.
    window = sliding_window if sliding_window and sliding_window < length else 0
    query, key, value = (
        part.transpose(1, 2).flatten(0, 1)  # [B·T, H, D]
        for part in (query, key, value)
    )
    if query.is_cuda:
        out = _by_kernel(query, key, value, cu_seq_lens_q, longest, scaling, window)
    else:
        out = _by_document(query, key, value, cu_seq_lens_q, longest, scaling, window)
    return out.unflatten(0, (batch, length)), None


def _group_arguments(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the argument that lets a kernel take fewer heads of keys than of queries.

    torch 2.11 has none; its kernel takes them.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


_GROUPS = _group_arguments(varlen_attn)  # here, since `_by_kernel` is traced


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Attend within each document by torch's kernel. query, key: [B·T, H, D]; value: [B·T, H, V].

    The kernel takes heads of one size, a multiple of eight: others are filled up with zeros, which
    add nothing to a score.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    wide = max(query.shape[-1], value.shape[-1])
    wide += -wide % _ALIGNED
    parts = [
        F.pad(part, (0, wide - part.shape[-1])) if part.shape[-1] < wide else part
        for part in (query, key, value)
    ]
    out = varlen_attn(
        *parts,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(window - 1, 0) if window else (-1, 0),
        **_GROUPS,
    )
    return out[..., : value.shape[-1]]


@torch.compiler.disable  # or each division of a row into documents would be compiled anew
def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Attend within each document by itself. query, key, value: [B·T, H, D].

    Fails where the kernel of a GPU would silently compute too little.
    """
    done = []
    for first, last in pairwise(boundaries.tolist()):
        assert last - first <= longest, f"a document of {last - first} tokens, not of {longest}"
        parts = [part[first:last].transpose(0, 1)[None] for part in (query, key, value)]
        mask = None
        if window and last - first > window:
            at = torch.arange(last - first)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        out = F.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        done.append(out[0].transpose(0, 1))
    return torch.cat(done)


# It has no entry in AttentionMaskInterface: transformers makes no mask then.
AttentionInterface.register(VARLEN, _varlen)
