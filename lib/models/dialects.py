"""Write configs that both transformers 5 and older programs read correctly.

transformers 5 stores RoPE settings in `rope_parameters` and has renamed other fields. transformers
4, mlx-lm and Ollama read only the earlier keys; if those are missing, these programs silently use a
RoPE base of 10,000. A config with both sets of keys describes the same model to all programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = "text_config"  # in models that also read images: the config of the part that we train
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_BASE = "rope_theta"
_SHARE = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeKeys:
    """The earlier keys of a family's RoPE settings.

    base: key of the RoPE base. share: key of the share of each head that RoPE rotates.
    sliding_base: key of the base in layers with sliding attention, or "". kind: key of the RoPE
    type within `rope_scaling`. scales: whether older programs read `rope_scaling` for the family.
    """

    base: str = _BASE
    share: str = _SHARE
    sliding_base: str = ""
    kind: str = "rope_type"
    scales: bool = True


_USUAL = RopeKeys()
_GPT_NEOX = RopeKeys(base="rotary_emb_base", share="rotary_pct")
_GEMMA = RopeKeys(sliding_base="rope_local_base_freq")
_TYPE = RopeKeys(kind="type")  # these families reject unexpected fields in `rope_scaling`
# By model_type. Other families use _USUAL. None: transformers 5 writes the earlier keys itself.
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
# Fields that transformers 5 renamed: model_type → new name → earlier name.
RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
# Tokenizer classes that only transformers 5 has → the equivalent class that both versions have.
_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# Arguments of loading and facts about one machine, which do not belong into a file.
_MACHINE_KEYS = {
    *("is_local", "local_files_only", "cache_dir", "_commit_hash", "_name_or_path"),
    *("_attn_implementation", "_attn_implementation_autoset"),
}
# Keys with the name of the base model, or its path on the machine that saved it.
_NAME_KEYS = {"name_or_path", "special_tokens_map_file", "tokenizer_file"}
_PATH = re.compile(r"(/|~|\.{1,2}/|[A-Za-z]:\\|\\\\)")


def add_earlier_keys(config: Mapping[str, Any], tied: bool | None = None) -> dict[str, Any]:
    """Return a config with the earlier keys in addition to those of transformers 5.

    config: the content of config.json. tied: whether input and output embeddings are tied, used if
    the config does not say. Earlier keys with another value are set to the value that transformers
    5 uses. An existing `rope_scaling` stays, because transformers 5 prefers it to
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
    """Return a config with this dtype for the weights, also in `text_config`.

    `torch_dtype` is changed only if it exists, and `text_config` only if it contains a dtype.
    """
    full = {**config, "dtype": dtype}
    if "torch_dtype" in full:
        full["torch_dtype"] = dtype
    text = full.get(_TEXT)
    if isinstance(text, dict) and text.keys() & {"dtype", "torch_dtype"}:
        full[_TEXT] = set_dtype(text, dtype)
    return full


def list_added_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys that only `after` contains.

    Keys within `text_config` are returned as `text_config.key`.
    """
    added = [key for key in after if key not in before]
    text = before.get(_TEXT)
    if isinstance(text, dict):
        added += [f"{_TEXT}.{key}" for key in list_added_keys(text, after[_TEXT])]
    return sorted(added)


def remove_keys(config: Mapping[str, Any], keys: object) -> dict[str, Any]:
    """Return a config without the keys that `list_added_keys` returned.

    keys: read from a manifest and therefore of any type. Only keys that this module adds are
    removed.
    """
    listed = keys if isinstance(keys, list) else []
    names = {key for key in listed if isinstance(key, str) and _is_earlier(key)}
    remaining = {key: value for key, value in config.items() if key not in names}
    text = remaining.get(_TEXT)
    if isinstance(text, dict):
        prefix = f"{_TEXT}."
        text_keys = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        remaining[_TEXT] = remove_keys(text, text_keys)
    return remaining


def _is_earlier(key: str) -> bool:
    """Return whether this module adds a key to configs."""
    rows = [row for row in (_USUAL, *ROPE_KEYS.values()) if row]
    known = {name for row in rows for name in (row.base, row.share, row.sliding_base) if name}
    known |= {earlier for names in RENAMED.values() for earlier in names.values()}
    known |= {"rope_scaling", _ORIGINAL, "dtype", "torch_dtype", "tie_word_embeddings"}
    return key.removeprefix(f"{_TEXT}.") in known


def remove_traces(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys that describe the machine or the user that saved it.

    config: the content of config.json, generation_config.json or tokenizer_config.json. The name of
    a model on the Hub stays in a tokenizer's config.
    """

    def is_trace(key: str, value: object) -> bool:
        is_path = isinstance(value, str) and bool(_PATH.match(value))
        return key in _MACHINE_KEYS or (key in _NAME_KEYS and is_path)

    return {
        key: remove_traces(value) if key == _TEXT and isinstance(value, dict) else value
        for key, value in config.items()
        if not is_trace(key, value)
    }


def translate_tokenizer(config: Mapping[str, Any], template: str = "") -> dict[str, Any]:
    """Return a tokenizer_config.json that transformers 4 and 5 read in the same way.

    template: the content of chat_template.jinja, for programs that do not read that file. Named
    templates in the config stay.
    """
    full = remove_traces(config)
    name = full.get("tokenizer_class")
    if isinstance(name, str) and name in _TOKENIZER_CLASSES:
        full["tokenizer_class"] = _TOKENIZER_CLASSES[name]
    if isinstance(full.get("extra_special_tokens"), list):  # transformers 4 expects a dict
        extra = full.pop("extra_special_tokens")
        full["additional_special_tokens"] = extra or full.get("additional_special_tokens", [])
    if template and not isinstance(full.get("chat_template"), list):
        full["chat_template"] = template
    return full


def list_earlier_rope(config: Mapping[str, Any]) -> list[str]:
    """Return the earlier keys that describe a config's RoPE settings."""
    return list(_find_earlier_rope(config))


def _find_earlier_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the earlier keys of a config's RoPE settings, or {} if none apply."""
    keys = ROPE_KEYS.get(str(config.get("model_type")), _USUAL)
    if keys is None:
        return {}
    full, sliding = _split_by_layers(config)
    rope = {
        earlier: full[name]
        for name, earlier in ((_BASE, keys.base), (_SHARE, keys.share))
        if full.get(name) is not None
    }
    if keys.sliding_base and sliding.get(_BASE) is not None:
        rope[keys.sliding_base] = sliding[_BASE]
    if full and keys.scales and not config.get("rope_scaling"):
        rope["rope_scaling"] = _find_scaling(full, keys)
    if full.get("rope_type") == "longrope" and _ORIGINAL in full and _ORIGINAL not in config:
        rope[_ORIGINAL] = full[_ORIGINAL]
    return rope


def _split_by_layers(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the RoPE settings of layers with full and with sliding attention.

    Both are empty if the layers differ and the family's earlier keys cannot express that. As in
    transformers 5, `rope_scaling` replaces the settings of all layers. If the layers differ, it
    extends the settings of layers with full attention instead.
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
    """Return the value of `rope_scaling`, or None if positions are not scaled."""
    scaling = {key: value for key, value in parameters.items() if key not in (_BASE, _SHARE)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" and not scaling.keys() - {"rope_type", "type"}:
        return None
    if keys.kind == "rope_type":
        return scaling
    moved = ("rope_type", "type", *((_ORIGINAL,) if kind == "longrope" else ()))
    return {keys.kind: kind} | {key: scaling[key] for key in scaling if key not in moved}
