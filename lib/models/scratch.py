"""Create the config and tokenizer of a model without weights: from a size or any config.json."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import commands, hashing, log, manifest, records, units
from lib.core.errors import UsageError
from lib.core.identity import find_differences, list_differences
from lib.models import dialects, tokenizer, training_text
from lib.models.directory import CONFIG, EARLIER_KEYS, rename_in_errors
from lib.models.scratch_sizes import SIZES, VOCABULARY_MULTIPLE, pad_vocabulary

if TYPE_CHECKING:
    from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase

PREFIX = "scratch-"  # of the default name of a model
_WEIGHT_KEYS = ("auto_map", "_name_or_path", "transformers_version")
_COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
    "hidden_size",
    "intermediate_size",
)


def find_option_problems(
    sizes: tuple[str | None, Path | None],
    tokenizers: tuple[Path | None, Path | None],
    vocab_size: int | None,
) -> Iterator[str]:
    """Yield what contradicts itself or is missing among the options of a model from scratch.

    sizes: --model-size and --config-json. tokenizers: --train-tokenizer and --tokenizer.
    """
    for (first, second), needed in (
        (sizes, f"--model-size ({', '.join(SIZES)}) or --config-json FILE"),
        (tokenizers, "a tokenizer: --train-tokenizer DATASET or --tokenizer DIR"),
    ):
        if bool(first) == bool(second):
            yield f"--from-scratch needs {needed}{', not both' if first else ''}"
    if tokenizers[0] and (vocab_size or 1 << 30) < tokenizer.SMALLEST_VOCABULARY:
        yield (
            f"--vocab-size {vocab_size} is too small: the bytes and special tokens alone need "
            f"{tokenizer.SMALLEST_VOCABULARY}"
        )


@dataclass(frozen=True)
class Design:
    """The settings of a model from scratch.

    size: a name in SIZES, or None if `config_json` is given. vocab_size: tokens in the vocabulary,
    or None for the default. train_on: datasets to train a tokenizer on. copy_from: directory with a
    tokenizer to copy. Without either, the tokenizer has one token per byte. has_tokenizer: False
    for a model that will only see token IDs; then there are neither `train_on` nor `copy_from`.
    tokenizer_kind: of a trained tokenizer, one of tokenizer.KINDS.
    """

    size: str | None
    config_json: Path | None
    vocab_size: int | None
    train_on: tuple[Path, ...]
    copy_from: Path | None
    has_tokenizer: bool = True
    tokenizer_kind: str = tokenizer.BYTE_LEVEL

    def choose_name(self) -> str:
        """Return the default name, such as `scratch-tiny` or `scratch-qwen2`."""
        return PREFIX + str(self.size or self._content["model_type"])

    def identity(self, name: str) -> dict[str, Any]:
        """Return the options and the fingerprints of inputs that determine the model's files."""
        inputs: dict[str, Any] = {}
        if self.config_json:
            inputs["config.json content"] = hashing.fingerprint(self._content)
        if self.train_on:
            inputs["dataset content"] = training_text.fingerprint(self.train_on)
        if self.copy_from:
            inputs["tokenizer files"] = tokenizer.fingerprint_tokenizer(self.copy_from)
        uses_default = bool(self.train_on) or not self.has_tokenizer
        vocab_size = self.vocab_size or (self._default_vocabulary() if uses_default else None)
        options = {
            "from_scratch": True,
            "model_name": name,
            "model_size": self.size,
            "vocab_size": vocab_size,
        }
        if self.size and (like := SIZES[self.size].like):
            options["shapes"] = like  # in earlier versions this size had another shape
        if not self.has_tokenizer:
            options["tokenizer"] = False
        if self.tokenizer_kind != tokenizer.BYTE_LEVEL:
            options["tokenizer_kind"] = self.tokenizer_kind
        return {"options": options, "inputs": inputs}

    def require_same(self, before: dict[str, Any], name: str) -> None:
        """Raise UsageError if the dataset or tokenizer has changed since `before` was computed."""
        if changed := find_differences(before, self.identity(name)):
            inputs = ", ".join(map(str, self.train_on)) or self.copy_from
            raise UsageError(
                f"{inputs} was replaced or changed while it was read; nothing was published",
                found=list_differences(changed),
                hint="once nothing writes to it:",
                run=commands.as_typed(),
            )

    def vocabulary(self) -> int:
        """Return the number of tokens. Raises UsageError if the tokenizer exceeds --vocab-size."""
        if not self.copy_from:
            if self.vocab_size:
                return self.vocab_size
            is_byte_tokenizer = self.has_tokenizer and not self.train_on
            return tokenizer.BYTE_VOCABULARY if is_byte_tokenizer else self._default_vocabulary()
        tokens = len(tokenizer.load_tokenizer(self.copy_from))
        if self.vocab_size and tokens > self.vocab_size:
            raise UsageError(
                f"--vocab-size {self.vocab_size} is smaller than the tokenizer",
                found=f"{units.counted(tokens, 'token')} in {self.copy_from}",
                expected=f"--vocab-size {tokens} or more, or no --vocab-size",
            )
        return self.vocab_size or tokens

    def context(self) -> int | None:
        """Return the context length in tokens, or None if the architecture has no limit."""
        if self.size:
            return SIZES[self.size].context
        return getattr(self._read_config().get_text_config(), "max_position_embeddings", None)

    def describe(self, vocabulary: int) -> dict[str, str]:
        """Return texts that describe the model, by the name of the property."""
        if self.size:
            return describe_size(self.size, vocabulary)
        from lib.models import architecture

        with tempfile.TemporaryDirectory() as preview, self._rename_errors(Path(preview)):
            self.write(Path(preview), vocabulary, None)
            model = architecture.build_on_meta(Path(preview))
        rows = pad_vocabulary(vocabulary)
        context = self.context()
        config_rows = self._read_vocabulary()
        note = (
            f" ({self.config_json} says {config_rows})" if config_rows not in (None, rows) else ""
        )
        return {
            "architecture": f"{type(model).__name__} of {self.config_json}, "
            f"{units.count(model.num_parameters())} parameters",
            "vocabulary": _describe_rows(rows, vocabulary) + note,
            "context": units.counted(context, "token") if context else "not limited by the config",
        }

    def write_tokenizer(
        self,
        directory: Path,
        workers: int,
        show_progress: bool,
        limit: int = tokenizer.SAMPLE_BYTES,
    ) -> None:
        """Write the files of the tokenizer, if any. limit: maximum bytes of training text."""
        if not self.has_tokenizer:
            return
        if self.copy_from:
            tokenizer.copy_tokenizer(self.copy_from, self.context(), directory)
        else:
            tokenizer.train_tokenizer(
                self.train_on,
                self.vocabulary(),
                self.context(),
                directory,
                workers=workers,
                show_progress=show_progress,
                limit=limit,
                kind=self.tokenizer_kind,
            )

    def describe_tokenizer(self) -> str:
        """Return a text that says where the tokenizer comes from."""
        if not self.has_tokenizer:
            return "none"
        if self.copy_from:
            return f"copied from {self.copy_from}"
        return (
            f"trained on {', '.join(map(str, self.train_on))}"
            if self.train_on
            else "one token per byte"
        )

    def write_configs(self, directory: Path, vocabulary: int) -> dict[str, Any]:
        """Write the configs into the directory of the tokenizer.

        Returns entries about config.json for the manifest's summary. For some model types (qwen2 in
        5.23), transformers loads the tokenizer with a class for that type, whatever the tokenizer's
        files say. If this class adds tokens, the vocabulary is enlarged.
        """
        if not self.has_tokenizer:
            return {EARLIER_KEYS: self.write(directory, vocabulary, None)}
        alone = tokenizer.load_tokenizer(directory)
        added = self.write(directory, vocabulary, alone)
        with_config = tokenizer.load_tokenizer(directory)
        if type(with_config) is not type(alone):
            log.warn(
                f"transformers loads the tokenizer of this model as {type(with_config).__name__}, "
                f"with {len(with_config):,} tokens instead of {len(alone):,}; it may split text "
                "in another way than the tokenizer alone"
            )
            added = self.write(directory, max(vocabulary, len(with_config)), with_config)
        return {EARLIER_KEYS: added}

    def write(
        self, directory: Path, vocabulary: int, loaded: PreTrainedTokenizerBase | None
    ) -> list[str]:
        """Write `config.json` and `generation_config.json`.

        loaded: the tokenizer, whose special tokens the configs name. Returns the keys in
        config.json that only older programs need.
        """
        special = {
            f"{kind}_token_id": getattr(loaded, f"{kind}_token_id", None)
            for kind in ("bos", "eos", "pad")
        }
        if self.size:
            config = make_config(
                self.size,
                vocabulary,
                special["bos_token_id"],
                special["eos_token_id"],
                special["pad_token_id"],
            )
        else:
            config = self._read_config()
            for part in {id(p): p for p in (config, config.get_text_config())}.values():
                part.update({**special, "vocab_size": pad_vocabulary(vocabulary)})
            config.dtype = "float32"
        config.save_pretrained(directory)
        content = dialects.set_dtype(records.read_json(directory / CONFIG), "float32")
        full = dialects.add_earlier_keys(content, getattr(config, "tie_word_embeddings", None))
        manifest.write_json(directory / CONFIG, full)
        known = {key: value for key, value in special.items() if value is not None}
        manifest.write_json(directory / "generation_config.json", {**known, "do_sample": True})
        return dialects.list_added_keys(content, full)

    def _default_vocabulary(self) -> int:
        if self.size:
            return SIZES[self.size].vocabulary
        rows = self._read_vocabulary()
        fewest = tokenizer.SMALLEST_VOCABULARY if self.has_tokenizer else 2
        if not isinstance(rows, int) or rows < fewest:
            raise UsageError(
                f"{self.config_json} has no vocabulary size that can be used",
                expected="--vocab-size N",
            )
        return rows

    def _read_vocabulary(self) -> Any:
        """Return the vocabulary size in the config.json, or its default; it may have any type."""
        text = self._content.get("text_config") or {}
        rows = self._content.get("vocab_size") or text.get("vocab_size")
        return rows or getattr(self._read_config().get_text_config(), "vocab_size", None)

    @cached_property
    def _content(self) -> dict[str, Any]:
        """Return the content of the config.json without keys that belong to particular weights."""
        assert self.config_json  # otherwise there is a size
        try:
            content = records.read_json(self.config_json)
        except FileNotFoundError:
            raise UsageError(f"--config-json: no such file: {self.config_json}") from None
        except ValueError as error:
            raise UsageError(
                f"--config-json: {self.config_json} is not JSON", found=str(error)
            ) from None
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise UsageError(
                f"--config-json: {self.config_json} is not the config of a model",
                expected="a JSON object with a model_type, as in config.json",
            )
        if content.get("quantization_config"):
            raise UsageError(
                f"--config-json: {self.config_json} describes a quantised model, which "
                "cannot be trained",
                found="quantization_config",
                expected="the config.json of the unquantised release",
            )
        return {key: value for key, value in content.items() if key not in _WEIGHT_KEYS}

    def _read_config(self) -> PretrainedConfig:
        """Return the config as transformers reads it. Raises UsageError for counts below 1."""
        from lib.models import architecture

        with tempfile.TemporaryDirectory() as copy, self._rename_errors(Path(copy)):
            manifest.write_json(Path(copy) / CONFIG, self._content)
            config = architecture.read_config(Path(copy))
        counts = {key: getattr(config.get_text_config(), key, None) for key in _COUNTS}
        if invalid := [f"{key}: {n}" for key, n in counts.items() if isinstance(n, int) and n < 1]:
            raise UsageError(
                f"--config-json: {self.config_json} contains counts below 1",
                expected="1 or more for each",
                found=", ".join(invalid),
            )
        return config

    def _rename_errors(self, directory: Path) -> AbstractContextManager[None]:
        """Replace paths of a temporary directory in errors by the path in --config-json."""
        return rename_in_errors(str(self.config_json), directory / CONFIG, directory)


def _describe_rows(rows: int, vocabulary: int) -> str:
    """Return a text about the rows of the embedding."""
    return (
        f"{rows:,} rows for {units.counted(vocabulary, 'token')}, a multiple of "
        f"{VOCABULARY_MULTIPLE}"
    )


def describe_size(size: str, vocabulary: int) -> dict[str, str]:
    """Return texts that describe a size, by the name of the property."""
    shape = SIZES[size]
    rows = pad_vocabulary(vocabulary)
    return {
        "size": f"{size}, {units.count(shape.parameters(rows))} parameters"
        + (f", the shapes of {shape.like}" if shape.like else ""),
        "layers": f"{shape.layers} of width {shape.hidden}, {shape.heads} heads"
        + (f" sharing {shape.kv_heads} key-value heads" if shape.kv_heads < shape.heads else "")
        + f", MLP width {shape.intermediate}",
        "vocabulary": _describe_rows(rows, vocabulary),
        "context": f"{shape.context:,} tokens",
    }


def make_config(
    size: str, vocabulary: int, bos: int | None, eos: int | None, pad: int | None = None
) -> LlamaConfig:
    """Return the config of a size, with a padded vocabulary. bos, eos, pad: token ids."""
    from transformers import LlamaConfig

    shape = SIZES[size]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=pad_vocabulary(vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
