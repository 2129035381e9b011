"""What a model that is trained on conversations needs beside its weights to hold one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.core import manifest, records
from lib.models.tokenizer import CHAT_TEMPLATE

_GENERATION, _TOKENIZER, _MODEL = "generation_config.json", "tokenizer_config.json", "config.json"
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
        config = config.get("text_config") or config
        generation = {name: config[name] for name in _IDS if config.get(name) is not None}
    before = generation.get(_EOS)
    ended = before if isinstance(before, list) else [] if before is None else [before]
    generation[_EOS] = list(dict.fromkeys([*stops, *ended]))
    manifest.write_json(directory / _GENERATION, generation)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file of JSON, empty where there is none."""
    return dict(records.read_json(path)) if path.is_file() else {}
