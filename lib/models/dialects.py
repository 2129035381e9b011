"""Adds to the files of a model what programs read that do not know the keys of transformers 5.

transformers 5 keeps the RoPE settings of a model in `rope_parameters` and has renamed other fields.
transformers 4, mlx-lm and Ollama read the earlier keys alone: without them they compute with a base
of 10,000 and print no warning. A config with both sets of keys is the same model to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = "text_config"  # of a model that also reads images: the part that we train
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_BASE = "rope_theta"
_SHARE = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeKeys:
    """Names the earlier keys of a family.

    base, share: of the base and of the part of a head that is rotated. sliding_base: of the base in
    layers with sliding attention, where the family has one. kind: of the type of a scaling. scales:
    the family knew `rope_scaling`.
    """

    base: str = _BASE
    share: str = _SHARE
    sliding_base: str = ""
    kind: str = "rope_type"
    scales: bool = True


_USUAL = RopeKeys()
_GPT_NEOX = RopeKeys(base="rotary_emb_base", share="rotary_pct")
_GEMMA = RopeKeys(sliding_base="rope_local_base_freq")
_TYPE = RopeKeys(kind="type")  # these refuse a scaling with any field that they do not expect
# By model_type; every other family has the usual keys. None: transformers 5 itself writes them.
ROPE_KEYS = {
    "bailing_hybrid": None,
    "cohere2_moe": None,
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": _GPT_NEOX,
    "gemma3_text": _GEMMA,
    "gemma3n_text": _GEMMA,
    "modernbert-decoder": RopeKeys(
        base="global_rope_theta", sliding_base="local_rope_theta", scales=False
    ),
    "olmo": _TYPE,
    "olmo2": _TYPE,
    "olmo3": _USUAL,
    "phi3": _TYPE,
    "phi4_multimodal": _TYPE,
}
# Fields that transformers 5 writes under another name: model_type → its name → the earlier name.
RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
# Classes that transformers 5 alone has: its name → the one that both know, for the same tokenizer.
_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
_OF_THE_MACHINE = ("is_local", "local_files_only")  # how a tokenizer was loaded, not what it is


def add_earlier_keys(config: Mapping[str, Any], tied: bool | None = None) -> dict[str, Any]:
    """Return a config with the earlier keys beside those of transformers 5.

    config: the content of config.json. tied: whether input and output embedding are one, for a
    config that does not say so. An earlier key that contradicts gets the value that transformers 5
    computes with. A config that scales by `rope_scaling` keeps it: transformers 5 reads it before
    `rope_parameters`.
    """
    full = dict(config)
    text = full.get(_TEXT)
    if isinstance(text, dict):
        full[_TEXT] = add_earlier_keys(text)
    renamed = RENAMED.get(str(full.get("model_type")), {})
    full |= {earlier: full[name] for name, earlier in renamed.items() if name in full}
    full |= _find_earlier_rope(full)
    dtype = full.get("dtype") or full.get("torch_dtype")
    if dtype is not None:
        full |= {"dtype": dtype, "torch_dtype": dtype}
    if tied is not None:
        full.setdefault("tie_word_embeddings", tied)
    return full


def set_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config whose weights have this dtype, in its text part as well.

    The earlier name of the field and the text part get it only if they named a dtype before.
    """
    full = {**config, "dtype": dtype}
    if "torch_dtype" in full:
        full["torch_dtype"] = dtype
    text = full.get(_TEXT)
    if isinstance(text, dict) and text.keys() & {"dtype", "torch_dtype"}:
        full[_TEXT] = set_dtype(text, dtype)
    return full


def list_added(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys that a config has gained, those of its text part as `text_config.key`."""
    added = [key for key in after if key not in before]
    text = before.get(_TEXT)
    if isinstance(text, dict):
        added += [f"{_TEXT}.{key}" for key in list_added(text, after[_TEXT])]
    return sorted(added)


def remove(config: Mapping[str, Any], keys: object) -> dict[str, Any]:
    """Return a config without the keys that `list_added` named.

    keys: as a manifest holds them; only keys that this module can have added are removed.
    """
    listed = keys if isinstance(keys, list) else []
    names = {key for key in listed if isinstance(key, str) and _is_earlier(key)}
    left = {key: value for key, value in config.items() if key not in names}
    text = left.get(_TEXT)
    if isinstance(text, dict):
        prefix = f"{_TEXT}."
        left[_TEXT] = remove(text, [k.removeprefix(prefix) for k in names if k.startswith(prefix)])
    return left


def _is_earlier(key: str) -> bool:
    rows = [row for row in (_USUAL, *ROPE_KEYS.values()) if row]
    known = {name for row in rows for name in (row.base, row.share, row.sliding_base) if name}
    known |= {earlier for names in RENAMED.values() for earlier in names.values()}
    known |= {"rope_scaling", _ORIGINAL, "dtype", "torch_dtype", "tie_word_embeddings"}
    return key.removeprefix(f"{_TEXT}.") in known


def translate_tokenizer(config: Mapping[str, Any], template: str = "") -> dict[str, Any]:
    """Return a tokenizer_config.json that transformers 4 and 5 read alike.

    template: that of chat_template.jinja, for programs that do not read this file. Named templates
    that the config holds stay.
    """
    full = {key: value for key, value in config.items() if key not in _OF_THE_MACHINE}
    name = full.get("tokenizer_class")
    if isinstance(name, str) and name in _TOKENIZER_CLASSES:
        full["tokenizer_class"] = _TOKENIZER_CLASSES[name]
    if isinstance(full.get("extra_special_tokens"), list):  # transformers 4 wants a mapping there
        extra = full.pop("extra_special_tokens")
        full["additional_special_tokens"] = extra or full.get("additional_special_tokens", [])
    if template and not isinstance(full.get("chat_template"), list):
        full["chat_template"] = template
    return full


def _find_earlier_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the earlier keys of a config's RoPE settings, empty where there are none to write."""
    keys = ROPE_KEYS.get(str(config.get("model_type")), _USUAL)
    if keys is None:
        return {}
    full, sliding = _split_by_layers(config)
    found = {
        earlier: full[name]
        for name, earlier in ((_BASE, keys.base), (_SHARE, keys.share))
        if full.get(name) is not None
    }
    if keys.sliding_base and sliding.get(_BASE) is not None:
        found[keys.sliding_base] = sliding[_BASE]
    if full and keys.scales and not config.get("rope_scaling"):
        found["rope_scaling"] = _find_scaling(full, keys)
    if full.get("rope_type") == "longrope" and _ORIGINAL in full and _ORIGINAL not in config:
        found[_ORIGINAL] = full[_ORIGINAL]
    return found


def _split_by_layers(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of layers with full and with sliding attention, as far as they differ.

    Both are empty for a family whose earlier keys cannot say what the layers differ in. As in
    transformers 5, `rope_scaling` replaces the settings of all layers, or adds to those of layers
    with full attention.
    """
    parameters = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    parameters = parameters if isinstance(parameters, dict) else {}
    by_layer = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    is_known = str(config.get("model_type")) in ROPE_KEYS and by_layer.keys() <= {_FULL, _SLIDING}
    if by_layer and is_known:
        return by_layer.get(_FULL, {}) | scaling, by_layer.get(_SLIDING, {})
    parameters = scaling or parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        return {}, {}
    return parameters, {}


def _find_scaling(parameters: Mapping[str, Any], keys: RopeKeys) -> dict[str, Any] | None:
    """Return what stands in `rope_scaling`, None if positions are not scaled."""
    scaling = {key: value for key, value in parameters.items() if key not in (_BASE, _SHARE)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" and not scaling.keys() - {"rope_type", "type"}:
        return None
    if keys.kind == "rope_type":
        return scaling
    beside = ("rope_type", "type", *((_ORIGINAL,) if kind == "longrope" else ()))
    return {keys.kind: kind} | {key: scaling[key] for key in scaling if key not in beside}
