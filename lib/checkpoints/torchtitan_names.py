"""Translate the tensors of torchtitan's Llama to the names and rotary layout of transformers.

torchtitan rotates pairs of neighbouring features (x0, x1), (x2, x3), …; transformers rotates
feature i of a head with feature i + half. The rows of the query and key projections are therefore
in another order. All other tensors differ only in their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import Tensor
from transformers import PretrainedConfig

_MARK = "tok_embeddings.weight"  # no model of transformers has this name
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUTSIDE = {
    _MARK: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # torchtitan's name of the head until 2026
    "lm_head.weight": "lm_head.weight",
}
_INSIDE = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_TABLES = ("freqs_cis", "rope.cache")  # rotary tables, which transformers computes
# Model types of transformers that compute the same as torchtitan's Llama.
_MODEL_TYPES = ("llama",)
_SUPPORTED = "Llama"


def is_torchtitan(names: Iterable[str]) -> bool:
    """Return whether tensors have the names of torchtitan's models."""
    return _MARK in names


def can_translate(config: PretrainedConfig) -> bool:
    """Return whether the names of torchtitan are known for this kind of model."""
    return config.model_type in _MODEL_TYPES


def translate_name(name: str) -> str | None:
    """Return the name that transformers has for a tensor of torchtitan's Llama.

    Returns the name itself if it is unknown, and None for tables that are computed.
    """
    if name.endswith(_TABLES):
        return None
    layer = _LAYER.fullmatch(name.replace(".qkv_linear.", "."))
    if layer and layer[2] in _INSIDE:
        return f"model.layers.{layer[1]}.{_INSIDE[layer[2]]}"
    return _OUTSIDE.get(name, name)


def find_conversion(name: str, config: PretrainedConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the function that puts the rows of a tensor into the order of transformers.

    name: the tensor's name in transformers. Returns None if the rows have the same order in both.
    """
    heads = {
        "q_proj.weight": config.num_attention_heads,
        "k_proj.weight": config.num_key_value_heads,
    }
    for end, count in heads.items():
        if name.endswith(end):
            return lambda tensor: _reorder_rows(tensor, count)
    return None


def explain_mismatch(names: Iterable[str], config: PretrainedConfig) -> str:
    """Return why a checkpoint of torchtitan cannot be translated, and what to do.

    names: names of the tensors that do not fit. Returns "" if the translation is not the reason.
    """
    if not can_translate(config):
        reason = f"its names are known here for {_SUPPORTED} only, not for {config.model_type}"
    elif any(".wqkv." in name for name in names):
        reason = "its queries, keys and values are one tensor, whose layout is not known here"
    else:
        return ""
    return (
        f"torchtitan saved this checkpoint, and {reason}; its own "
        "scripts/checkpoint_conversion/convert_to_hf.py writes safetensors for -m"
    )


def _reorder_rows(tensor: Tensor, heads: int) -> Tensor:
    """Return a projection [heads × size, inputs] with the even rows of each head first."""
    rows = tensor.shape[0]
    pairs = tensor.view(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
