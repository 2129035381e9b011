"""Read from the files of a model directory what other programs read from them.

Imports neither torch nor transformers, and opens no pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import artifacts, records
from lib.core.errors import ArtifactError
from lib.models import chat_files, dialects
from lib.models.directory import CONFIG, list_missing_weights, list_weight_files, read_header

_GENERATION = "generation_config.json"
_PREFIX = "model."
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. dtype: as in the header, for example BF16."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class DirectoryFacts:
    """The files of a model directory, as other programs read them.

    config, generation, settings, tokenizer: the contents of config.json, generation_config.json,
    tokenizer_config.json and tokenizer.json; {} for a file that does not exist. tensors: by name,
    from the headers. problems: one message per damaged or missing file of weights.
    """

    directory: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    settings: dict[str, Any]
    tokenizer: dict[str, Any]
    tensors: dict[str, StoredTensor]
    problems: list[str]

    @classmethod
    def read(cls, directory: Path) -> DirectoryFacts:
        """Return the facts about a directory.

        Raises ArtifactError if it contains no config.json, or a JSON file is damaged.
        """
        if not (directory / CONFIG).is_file():
            is_adapter = (directory / "adapter_config.json").is_file()
            raise ArtifactError(
                f"{directory} contains no {CONFIG}",
                found="an adapter of PEFT" if is_adapter else "",
                hint="stage 05 without --adapter merges an adapter of its run into the model"
                if is_adapter
                else "stage 05 writes model directories, and -m of stage 04 names them",
            )
        tensors: dict[str, StoredTensor] = {}
        problems = list_missing_weights(directory)
        for name in [] if problems else list_weight_files(directory):
            path = directory / name
            try:
                header, _ = read_header(path, path.stat().st_size)
            except ValueError as error:
                problems.append(f"{name} is damaged: {error}")
                continue
            for key, entry in header.items():
                tensors[key] = StoredTensor(name, tuple(entry["shape"]), entry["dtype"])
        return cls(
            directory,
            chat_files.read_object(directory / CONFIG),
            chat_files.read_object(directory / _GENERATION),
            chat_files.read_object(directory / artifacts.TOKENIZER_CONFIG),
            chat_files.read_object(directory / artifacts.TOKENIZER),
            tensors,
            problems,
        )

    @property
    def architecture(self) -> str:
        """Return the first name in `architectures`, or "" if there is none."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def model_type(self) -> str:
        """Return the model type in config.json, or ""."""
        return str(self.config.get("model_type", ""))

    @property
    def text_config(self) -> dict[str, Any]:
        """Return the config of the part that computes text, which may be the config itself."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @cached_property
    def earlier_keys(self) -> dict[str, Any]:
        """Return the keys that programs before transformers 5 need and config.json lacks."""
        full = dialects.add_earlier_keys(self.config)
        keys = dialects.list_earlier_rope(self.config)
        absent = object()
        return {key: full[key] for key in keys if self.config.get(key, absent) != full[key]}

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Return the ID of each token in tokenizer.json, added ones included."""
        vocabulary = self.tokenizer.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
            vocabulary = {str(pair[0]): index for index, pair in enumerate(vocabulary)}
        added = {str(token["content"]): int(token["id"]) for token in self.added_tokens}
        return {**vocabulary, **added}

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the entries `added_tokens` of tokenizer.json."""
        return list(self.tokenizer.get("added_tokens") or [])

    @property
    def has_template(self) -> bool:
        """Return whether the model has a chat template, in any of its places."""
        names = (artifacts.CHAT_TEMPLATE, artifacts.OLD_CHAT_TEMPLATE)
        in_file = any((self.directory / name).is_file() for name in names)
        return in_file or bool(self.settings.get("chat_template"))

    @property
    def is_byte_level(self) -> bool:
        """Return whether tokenizer.json is a byte-level BPE."""
        model = self.tokenizer.get("model", {})
        return model.get("type") == "BPE" and not model.get("byte_fallback")

    def has_file(self, name: str) -> bool:
        """Return whether the directory contains a file."""
        return (self.directory / name).is_file()

    def list_metadata_problems(self) -> list[str]:
        """Return the names of safetensors files whose metadata do not say `format: pt`."""
        return [
            name
            for name in sorted({tensor.file for tensor in self.tensors.values()})
            if _read_metadata(self.directory / name).get("format") != "pt"
        ]


def _read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file, which `read_header` has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata = records.parse_json(file.read(length)).get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}
