"""Choose the function that computes attention, and make the inputs that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from lib.core import commands, log
from lib.core.errors import UsageError
from lib.models.architecture import list_names
from lib.parallel.varlen import VARLEN, row_ends
from lib.tokens.batches import MicroBatch

_FLASH = "flash_attention_2"
_WITH_BOUNDARIES = (VARLEN, _FLASH)  # they take document boundaries instead of a mask
_MAX_HEAD_SIZE = 256  # of the kernel for packed documents; in torch and in flash_attn
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

# A function of transformers' attention interface: it takes (module, query, key, value, mask) and
# options by name, and returns the output [B, T, H, D] and the weights or None.
Attend = Callable[..., tuple[Tensor, Tensor | None]]


class HeadSizes(NamedTuple):
    """The sizes of a model's widest heads; 0 if its config does not contain them."""

    query: int  # and key
    value: int


def wrap_functions(wrap: Callable[[Attend], Attend]) -> None:
    """Wrap every function that computes attention in this process.

    Each layer of a model asks transformers' interface for its function, whatever the implementation
    (sdpa, eager, flex_attention, flash_attention_2, varlen), so this one place wraps all of them.
    Call this before the first forward pass. Families that compute attention without the interface
    (Falcon, Bloom, MPT) are not wrapped.
    """
    get_interface = AttentionInterface.get_interface

    def get_wrapped(interface: AttentionInterface, name: str, default: Attend) -> Attend:
        return wrap(get_interface(interface, name, default))

    AttentionInterface.get_interface = get_wrapped


def choose_attention(
    option: str, needs_boundaries: bool, precision: str, config: PretrainedConfig
) -> str:
    """Return the name in transformers' attention interface for --attention.

    option: the value of --attention, except `flash` (see `resolve_flash`). needs_boundaries: the
    rows contain packed documents, or a rank has fewer queries than keys. Then `auto` on a GPU is
    varlen if the GPU, the precision and the model allow that kernel: sdpa would need a mask, which
    the fast kernels do not accept. Otherwise `auto` is sdpa, which uses the fastest causal kernel
    available. Raises UsageError if the implementation cannot train here.
    """
    on_gpu = torch.cuda.is_available()
    if option == "flex" and not on_gpu:
        raise UsageError(
            "--attention flex cannot train on a CPU", run=commands.as_typed("--attention", "sdpa")
        )
    problem = varlen_problem(precision, config) if on_gpu else ""
    if option == VARLEN and problem:
        raise UsageError(
            "--attention varlen cannot train here",
            found=problem,
            run=commands.as_typed("--attention", "sdpa"),
        )
    if option == _FLASH and (flash_reason := flash_problem(precision, config)):
        raise UsageError(
            f"--attention {_FLASH} cannot train here",
            found=flash_reason,
            run=commands.as_typed("--attention", "flash"),
        )
    if option == "auto":
        return VARLEN if needs_boundaries and on_gpu and not problem else "sdpa"
    return {"flex": "flex_attention"}.get(option, option)


def resolve_flash(precision: str, config: PretrainedConfig) -> str:
    """Return the value that replaces --attention flash here; if it is `auto`, log the reason."""
    if not (problem := flash_problem(precision, config)):
        return _FLASH
    if log.rank() == 0:
        log.info(f"attention: {problem}; using the fastest kernel available instead of {_FLASH}")
    return "auto"


def flash_problem(precision: str, config: PretrainedConfig) -> str:
    """Return why the package flash_attn cannot train a model on this GPU, or ""."""
    if not torch.cuda.is_available():
        return "flash_attn needs a GPU"
    package = find_spec("flash_attn")
    if (
        not package or not package.origin
    ):  # flash-attn-4 alone puts a directory without a module there
        return "the package flash_attn is not installed"
    if precision == "fp32":
        return "flash_attn does not support fp32"
    if torch.cuda.get_device_capability() < (8, 0):
        name = torch.cuda.get_device_name()
        return f"flash_attn needs compute capability 8.0, and {name} is older"
    if (widest := max(find_head_sizes(config))) > _MAX_HEAD_SIZE:
        return (
            f"flash_attn supports heads of at most {_MAX_HEAD_SIZE} numbers; "
            f"this model has {widest}"
        )
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_supported = getattr(family, "_supports_flash_attn", True)
    return "" if is_supported else f"transformers has no flash_attn for {config.model_type}"


def varlen_problem(precision: str, config: PretrainedConfig, any_gpu: bool = False) -> str:
    """Return why the kernel for packed documents cannot train a model on this GPU, or "".

    any_gpu: return only reasons that hold on every GPU; this machine may have none.
    """
    if precision == "fp32":
        return "the kernel for packed documents does not support fp32"
    if has_dropout(config):
        return "the kernel for packed documents does not support the dropout of this model"
    if _has_own_table(config):
        return f"transformers lets {config.model_type} models use only attention of their own"
    widest = max(find_head_sizes(config))
    if widest > _MAX_HEAD_SIZE:
        return (
            f"the kernel for packed documents supports heads of at most {_MAX_HEAD_SIZE} numbers; "
            f"this model has {widest}"
        )
    if any_gpu:
        return ""
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if capability < (8, 0):
        return f"the kernel for packed documents needs compute capability 8.0, and {name} is older"
    if 192 < widest <= 224 and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        return f"{name} has no backward kernel for packed documents with {widest} numbers per head"
    return ""


def _has_own_table(config: PretrainedConfig) -> bool:
    """Return whether a family has a table of the attention that it can use (Falcon, GPT-J)."""
    return any(name.endswith("_ATTENTION_CLASSES") for name in list_names(config))


def has_dropout(config: PretrainedConfig) -> bool:
    """Return whether a model applies dropout to its attention weights in training."""
    text = config.get_text_config()
    return any(get_field(text, name) for name in _DROPOUTS)


def get_field(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a config; None if it is missing or differs between layers."""
    with suppress(AttributeError, RuntimeError):  # RuntimeError of transformers: layers differ
        return getattr(config, name)
    return None


def find_head_sizes(config: PretrainedConfig) -> HeadSizes:
    """Return the sizes of a model's heads from its config, the largest of all layers."""
    text = config.get_text_config()
    sizes: dict[str, int] = {}
    _collect_sizes(text.to_dict(), sizes)
    latent = sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0)
    hidden, heads = (get_field(text, name) for name in ("hidden_size", "num_attention_heads"))
    even = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
    query = latent or sizes.get("head_dim") or even
    return HeadSizes(query, sizes.get("v_head_dim") or query)


def _collect_sizes(part: Mapping[Any, Any], sizes: dict[str, int]) -> None:
    """Collect the largest value of each key that ends in head_dim, also from nested parts."""
    for key, value in part.items():
        if isinstance(value, Mapping):
            _collect_sizes(value, sizes)
        elif str(key).endswith("head_dim") and isinstance(value, int):
            sizes[key] = max(value, sizes.get(key, 0))


def avoid_device_reads(model: nn.Module, packing: str, seq_length: int) -> None:
    """Keep transformers from reading values from the device, because the host would wait for it.

    Before it makes a mask, transformers reads from the device whether documents are packed. That
    check is removed if no mask is needed: for rows of one document, and for kernels that take
    document boundaries. Otherwise it stays, because it finds batches in which each row is one
    document. They need no mask and are fast. Some kinds of RoPE read the largest position, and
    GPT-2 looks for padding to warn about it.
    """
    if packing != "documents" or model.config._attn_implementation in _WITH_BOUNDARIES:
        masking_utils.find_packed_sequence_indices = _do_nothing
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = _do_nothing
    fix_rope_frequencies(model, packing, seq_length)


def fix_rope_frequencies(model: nn.Module, packing: str, seq_length: int) -> None:
    """Fix the frequencies of dynamic and longrope RoPE at the frequencies for `seq_length` tokens.

    These kinds of RoPE choose their frequencies by the largest position in a batch. With packed
    documents they continue to do so, unless all lengths up to `seq_length` give the same
    frequencies.
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


def _do_nothing(*_: Tensor | None) -> None:
    """Replace a function of transformers that reads values from the device."""


def make_inputs(model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of the model for a micro-batch.

    They include the positions if the family takes any; without them, a model counts from 0 in each
    row. With positions that restart and no mask, transformers keeps documents apart. The boundaries
    of documents are marked as dynamic for torch.compile: only the kernel reads them, so one graph
    serves any number of documents (`compiling.py` ensures the same for the length of the longest
    one). A copy to another device would lose the mark, so the batch must already be on the model's
    device.
    """
    arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    implementation = model.config._attn_implementation
    ends = batch.boundaries
    length = batch.row_length
    if batch.position_ids is not None:
        arguments["position_ids"] = batch.position_ids
    elif _takes_positions(type(model).forward):
        positions = torch.arange(length, device=batch.input_ids.device)
        arguments["position_ids"] = positions[None]
    takes_ends = implementation in _WITH_BOUNDARIES
    # Without these ends, each layer would read them from the device, or could not divide a row.
    if ends is None and takes_ends and (implementation == _FLASH or batch.context):
        ends = row_ends(len(batch.input_ids), length, batch.input_ids.device)
    if ends is not None and takes_ends:
        if batch.boundaries is not None:
            torch._dynamo.maybe_mark_dynamic(ends, 0)
        longest = batch.longest or length
        arguments |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    if batch.context:
        arguments |= batch.context.make_inputs(model, batch, ends if takes_ends else None)
    return arguments


@cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    """Return whether the forward pass of a class of models has an argument for positions."""
    return "position_ids" in inspect.signature(forward).parameters
