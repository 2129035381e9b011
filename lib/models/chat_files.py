"""Write the chat template and stop tokens of a model, and check the token IDs in its configs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.core import log, manifest, records
from lib.core.artifacts import CHAT_TEMPLATE, NAMED_TEMPLATES
from lib.core.errors import ArtifactError

_GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
_MODEL = "config.json"
_EOS = "eos_token_id"
_IDS = ("bos_token_id", "pad_token_id", _EOS)


def write_chat_files(directory: Path, template: str, stops: Sequence[int]) -> None:
    """Write the chat template, and the tokens that end an answer, into a model's directory.

    template: in Jinja. stops: token IDs, which are put before the existing stop IDs; `generate`
    stops at any of them. A template in the tokenizer's config is removed. `split_special_tokens` is
    turned off, because the template writes special tokens as text.
    """
    manifest.write_text(directory / CHAT_TEMPLATE, template)
    settings = read_object(directory / _TOKENIZER)
    _write_named_templates(directory, settings.pop("chat_template", None))
    if settings.get("split_special_tokens"):
        settings["split_special_tokens"] = False
    manifest.write_json(directory / _TOKENIZER, settings)
    generation = read_object(directory / _GENERATION)
    if not generation:  # as transformers derives it from the config of a model
        config = read_object(directory / _MODEL)
        text = config.get("text_config")
        config = text if isinstance(text, dict) and text else config
        generation = {name: config[name] for name in _IDS if config.get(name) is not None}
    earlier = generation.get(_EOS)
    earlier_stops = _as_list(earlier) if is_id(earlier) else []
    generation[_EOS] = list(dict.fromkeys([*stops, *earlier_stops]))
    manifest.write_json(directory / _GENERATION, generation)


def _write_named_templates(directory: Path, templates: Any) -> None:
    """Write the named templates of a tokenizer's config as files, except for the default one.

    templates: the value of `chat_template`, a list if there are several.
    """
    for entry in templates if isinstance(templates, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        is_name = isinstance(name, str) and re.fullmatch(r"[\w-]+", name)
        if is_name and name != "default" and isinstance(entry.get("template"), str):
            path = directory / NAMED_TEMPLATES / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            manifest.write_text(path, entry["template"])


def find_faults(directory: Path) -> list[str]:
    """Return a message for each config that is not a JSON object, and for each invalid token ID."""
    faults = []
    for name in (_MODEL, _GENERATION, _TOKENIZER):
        try:
            content = read_object(directory / name)
        except ArtifactError as error:
            faults.append(f"{name}: {error.found}")
            continue
        if name != _TOKENIZER:
            faults += [
                f"{name}: {key} is {content[key]!r:.60}, not a token id"
                for key in _IDS
                if not is_id(content.get(key))
            ]
    return faults


def is_id(value: Any) -> bool:
    """Return whether a value in a config is a token ID, a list of IDs, or null."""
    # -1 also means that there is no such token.
    return all(type(token) is int and token >= -1 for token in _as_list(value))


def _as_list(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def add_stop(directory: Path, stop: int) -> None:
    """Add a stop token to each config of a model that names only other stop tokens."""
    for name in (_GENERATION, _MODEL):
        content = read_object(directory / name)
        stops = list_stops(content)
        if stops and stop not in stops:
            manifest.write_json(directory / name, content | {_EOS: [*stops, stop]})


def list_stops(content: dict[str, Any]) -> list[int]:
    """Return the token IDs that end a text, according to a config."""
    return [token for token in _as_list(content.get(_EOS)) if token is not None]


def copy_generation(source: Path, target: Path) -> bool:
    """Copy generation_config.json without invalid token IDs; return False if there is none.

    Raises ArtifactError if it is damaged.
    """
    if not (source / _GENERATION).exists():
        return False
    content = read_object(source / _GENERATION)
    if invalid := [key for key in _IDS if not is_id(content.get(key))]:
        log.warn(f"{source / _GENERATION}: invalid token ids were left out: {', '.join(invalid)}")
        manifest.write_json(
            target / _GENERATION,
            {key: value for key, value in content.items() if key not in invalid},
        )
    else:
        shutil.copyfile(source / _GENERATION, target / _GENERATION)
    return True


def copy_stops(directory: Path) -> None:
    """Write the same tokens that end a text into generation_config.json and config.json.

    Some programs read only one of the two files. If it names fewer tokens, such a program would
    generate past the end of a turn. If neither file contains a list, only a missing token is added.
    """
    generation = read_object(directory / _GENERATION)
    config = read_object(directory / _MODEL)
    if not config:
        return
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    values = (generation.get(_EOS), config.get(_EOS), text.get(_EOS))
    known = [value for value in values if is_id(value) and _as_list(value)]
    if not known:
        return
    has_list = any(isinstance(value, list) for value in known)
    stops = list(dict.fromkeys(token for value in known for token in _as_list(value)))
    if generation and (has_list or generation.get(_EOS) is None):
        generation[_EOS] = stops if has_list else known[0]
        manifest.write_json(directory / _GENERATION, generation)
    if has_list:
        if _EOS in text:
            text[_EOS] = stops
        manifest.write_json(directory / _MODEL, config | {_EOS: stops})


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is no file.

    Raises ArtifactError if the file is damaged or is not a JSON object.
    """
    try:
        content = records.read_json(path) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    return content
