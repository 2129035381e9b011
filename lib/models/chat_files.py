"""What a model that is trained on conversations needs beside its weights to hold one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.core import log, manifest, records
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import ArtifactError

_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
_MODEL = "config.json"
_EOS = "eos_token_id"
_IDS = ("bos_token_id", "pad_token_id", _EOS)


def write(directory: Path, template: str, stops: Sequence[int]) -> None:
    """Write the chat template, and the tokens that end an answer, into a model's directory.

    template: in Jinja. stops: token ids; they come before those that ended a text so far, and
    `generate` ends at any of them. A template that the tokenizer's config holds would be another
    one, and special tokens must be read as such where the template writes them.
    """
    manifest.write_text(directory / CHAT_TEMPLATE, template)
    settings = _read(directory / _TOKENIZER)
    settings.pop("chat_template", None)
    if settings.get("split_special_tokens"):
        settings["split_special_tokens"] = False
    manifest.write_json(directory / _TOKENIZER, settings)
    generation = _read(directory / _GENERATION)
    if not generation:  # as transformers makes it of a model's config
        config = _read(directory / _MODEL)
        text = config.get("text_config")
        config = text if isinstance(text, dict) and text else config
        generation = {name: config[name] for name in _IDS if config.get(name) is not None}
    before = generation.get(_EOS)
    ended = _as_list(before) if is_id(before) else []
    generation[_EOS] = list(dict.fromkeys([*stops, *ended]))
    manifest.write_json(directory / _GENERATION, generation)


def find_faults(directory: Path) -> list[str]:
    """Return a sentence per config that is no JSON object or names an invalid special token id."""
    found = []
    for name in (_MODEL, _GENERATION, _TOKENIZER):
        try:
            content = _read(directory / name)
        except ArtifactError as error:
            found.append(f"{name}: {error.found}")
            continue
        if name != _TOKENIZER:
            found += [
                f"{name}: {key} is {content[key]!r:.60}, not a token id"
                for key in _IDS
                if not is_id(content.get(key))
            ]
    return found


def is_id(value: Any) -> bool:
    """Return whether a value of a config is a token id, a list of ids, or null."""
    # -1 stands for none, too.
    return all(type(each) is int and each >= -1 for each in _as_list(value))


def _as_list(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def copy_generation(source: Path, target: Path) -> bool:
    """Copy generation_config.json without invalid token ids; return whether there is one.

    Raises ArtifactError if it is damaged.
    """
    if not (source / _GENERATION).exists():
        return False
    content = _read(source / _GENERATION)
    if odd := [key for key in _IDS if not is_id(content.get(key))]:
        log.warn(f"{source / _GENERATION}: invalid token ids were left out: {', '.join(odd)}")
        manifest.write_json(
            target / _GENERATION, {key: value for key, value in content.items() if key not in odd}
        )
    else:
        shutil.copyfile(source / _GENERATION, target / _GENERATION)
    return True


def copy_stops(directory: Path) -> None:
    """Write the tokens that end a text into config.json as generation_config.json lists them.

    Programs that read config.json alone would generate past the end of a turn. A single token
    stays as it is: the two files then agree, or differ as in the base model.
    """
    stops = _read(directory / _GENERATION).get(_EOS)
    config = _read(directory / _MODEL)
    if not isinstance(stops, list) or not config:
        return
    text = config.get("text_config")
    if isinstance(text, dict) and _EOS in text:
        text[_EOS] = stops
    manifest.write_json(directory / _MODEL, config | {_EOS: stops})


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file of JSON, empty where there is none.

    Raises ArtifactError if it is not an object.
    """
    try:
        content = records.read_json(path) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    return content
