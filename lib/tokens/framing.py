"""Let a tokenizer add BOS and EOS to a text as the model was trained.

`add_bos_token` and `add_eos_token` in tokenizer_config.json may disagree with the post-processor in
tokenizer.json. transformers 5 follows the post-processor. transformers 4, with which most such
models were trained, built some classes of tokenizers from the two settings instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.core import manifest, records
from lib.core.artifacts import TOKENIZER, TOKENIZER_CONFIG

_BOS = "add_bos_token"
_EOS = "add_eos_token"
_TOKENS = {_BOS: "BOS", _EOS: "EOS"}
# Classes that transformers 4.57 builds from both settings → its default of add_bos_token.
_BUILT_FROM_SETTINGS = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}
_SAVED_BY_5 = "backend"  # a key that only transformers 5 writes; it leaves both settings out
_GENERIC = "PreTrainedTokenizerFast"  # transformers 4 and 5 read tokenizer.json for it as it is


def may_differ(directory: Path) -> bool:
    """Return whether the settings of a tokenizer may add other tokens than its tokenizer.json."""
    settings = _read_settings(directory)
    return bool(_list_defaults(settings) or settings.get(_BOS))


def follow_settings(tokenizer: Any, directory: Path) -> tuple[dict[str, bool], list[str]]:
    """Let a tokenizer add BOS and EOS as in training; return its changes and disagreements.

    tokenizer: loaded by transformers from the files in the directory. Changes: by setting whether a
    text gets the token, {} if it was so before. Disagreements: a line for each.
    """
    if not (directory / TOKENIZER).is_file() or not hasattr(tokenizer, "update_post_processor"):
        return {}, []  # transformers 5 follows the settings if it does not read tokenizer.json
    settings = _read_settings(directory)
    added = _find_added(tokenizer)
    in_training = _find_added_in_training(tokenizer, settings, added)
    changes = {} if in_training == added else in_training
    if changes:
        tokenizer.add_bos_token = in_training[_BOS]
        tokenizer.add_eos_token = in_training[_EOS]
    disagreements = [
        _describe_setting(settings, name, added[name], in_training[name])
        for name in _TOKENS
        if settings.get(name, in_training[name]) != added[name]
    ]
    return changes, disagreements


def write_agreeing(tokenizer: Any, directory: Path, has_disagreements: bool) -> None:
    """Rewrite the files of a tokenizer if transformers 4 or 5 would add other tokens than it does.

    tokenizer: loaded from the directory, after `follow_settings`, which found the disagreements.
    """
    if not all((directory / name).is_file() for name in (TOKENIZER, TOKENIZER_CONFIG)):
        return
    settings = _read_settings(directory)
    added = _find_added(tokenizer)
    if has_disagreements:
        manifest.write_json(directory / TOKENIZER, json.loads(tokenizer.backend_tokenizer.to_str()))
        # The class of a model may have other defaults than the generic one.
        settings |= {
            "tokenizer_class": _GENERIC,
            "padding_side": tokenizer.padding_side,
            "model_input_names": list(tokenizer.model_input_names),
            **{
                name: token
                for name, token in tokenizer.special_tokens_map.items()
                if isinstance(token, str)
            },
        }
    stored = records.read_mapping(directory / TOKENIZER_CONFIG)
    by_4 = {name: stored.get(name, add) for name, add in _list_defaults(settings).items()}
    if has_disagreements or by_4 not in ({}, added):
        manifest.write_json(directory / TOKENIZER_CONFIG, settings | added)


def _read_settings(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json without null, {} if there is none."""
    path = directory / TOKENIZER_CONFIG
    settings = records.read_mapping(path) if path.is_file() else {}
    return {
        name: value
        for name, value in settings.items()
        if name not in _TOKENS or isinstance(value, bool)
    }


def _find_class(settings: dict[str, Any]) -> str:
    return str(settings.get("tokenizer_class")).removesuffix("Fast")


def _list_defaults(settings: dict[str, Any]) -> dict[str, bool]:
    """Return the settings of a class that transformers 4 builds from them; {} for other classes."""
    add_bos = _BUILT_FROM_SETTINGS.get(_find_class(settings))
    return {} if add_bos is None else {_BOS: add_bos, _EOS: False}


def _find_added(tokenizer: Any) -> dict[str, bool]:
    """Return by setting whether a tokenizer adds the token to a text."""
    ids = tokenizer("a")["input_ids"]
    is_longer = len(ids) > len(tokenizer("a", add_special_tokens=False)["input_ids"])
    return {
        _BOS: is_longer and ids[0] == tokenizer.bos_token_id,
        _EOS: is_longer and ids[-1] == tokenizer.eos_token_id,
    }


def _find_added_in_training(
    tokenizer: Any, settings: dict[str, Any], added: dict[str, bool]
) -> dict[str, bool]:
    """Return by setting whether a text got the token in training.

    The settings count where transformers 4 followed them. Elsewhere the encoder counts, but a BOS
    that the settings demand is added. added: what the encoder adds.
    """
    defaults = _list_defaults(settings)
    if _SAVED_BY_5 in settings and settings.keys().isdisjoint(_TOKENS):
        defaults = {}
    in_training = added | defaults
    if defaults:
        in_training |= {name: settings[name] for name in _TOKENS if name in settings}
    elif settings.get(_BOS):
        in_training[_BOS] = True
    return {
        _BOS: in_training[_BOS] and tokenizer.bos_token_id is not None,
        _EOS: in_training[_EOS] and tokenizer.eos_token_id is not None,
    }


def _describe_setting(settings: dict[str, Any], name: str, is_added: bool, was_added: bool) -> str:
    """Return the line about a setting that disagrees with the encoder, and about what counts."""
    token = _TOKENS[name]
    source = TOKENIZER_CONFIG if name in settings else f"class {settings.get('tokenizer_class')}"
    value = json.dumps(settings.get(name, was_added))
    adds = "adds" if is_added else "does not add"
    counts = TOKENIZER if was_added == is_added else f"{source}, as in transformers 4,"
    result = "gets" if was_added else "does not get"
    return (
        f"{source} says {name}: {value}, but {TOKENIZER} {adds} {token}; {counts} "
        f"counts, and a text {result} {token}"
    )
