"""Report where the config of a model, its tokenizer and its weights disagree, and which counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from lib.core import log
from lib.core.artifacts import TOKENIZER_CONFIG
from lib.core.paths import short_name
from lib.models import chat_files
from lib.models.directory import CONFIG, INDEX, WEIGHTS, list_weight_files, read_header
from lib.models.tensors import FLOATING
from lib.tokens.build import require_vocabulary
from lib.tokens.encode import Encoder
from lib.train.config import Config
from lib.train.inputs import Inputs

_GENERATION = "generation_config.json"
_NO_LIMIT = 1 << 30  # transformers writes such a number if the tokenizer has no limit


def report_disagreements(config: Config, inputs: Inputs, shape: PretrainedConfig) -> None:
    """Log a line for each property that two files of a model describe in different ways.

    shape: the config of the model. Raises UsageError if the tokenizer has more tokens than the
    model has embeddings.
    """
    if log.rank() != 0 or config.makes_model:
        return
    findings = []
    if inputs.source.needs_tokenizer:
        encoder = Encoder(inputs.model_dir, 1)
        require_vocabulary(encoder.vocab_size, shape.get_text_config().vocab_size, inputs.model_dir)
        findings += encoder.disagreements
        findings += _compare_ends(encoder, inputs)
        findings += _compare_lengths(encoder, shape, config.seq_length)
    if not inputs.scratch:
        findings += _compare_weight_files(inputs.model_dir)
        findings += _compare_dtypes(inputs.model_dir)
    for finding in findings:
        log.info(f"{short_name(inputs.model_dir)}: {finding}")


def _compare_ends(encoder: Encoder, inputs: Inputs) -> Iterator[str]:
    """Yield a line for each EOS of the configs that is not the tokenizer's."""
    eos = encoder.eos
    if eos is None:
        return
    others: dict[tuple[int, ...], list[str]] = {}
    for name in (CONFIG, _GENERATION):
        stops = chat_files.list_stops(chat_files.read_object(inputs.model_dir / name))
        if stops and eos not in stops:
            others.setdefault(tuple(stops), []).append(name)
    for ends, names in others.items():
        yield (
            f"eos_token_id is {', '.join(map(str, ends))} in {' and '.join(names)}, but the EOS "
            f"of the tokenizer is {encoder.tokenizer.eos_token} ({eos}); the tokenizer counts, and "
            "the configs of an export name both"
        )


def _compare_lengths(encoder: Encoder, shape: PretrainedConfig, length: int) -> Iterator[str]:
    """Yield a line if a sequence is longer than the tokenizer's limit, but not than the model's."""
    limit = getattr(encoder.tokenizer, "model_max_length", None) or _NO_LIMIT
    longest = getattr(shape.get_text_config(), "max_position_embeddings", None)
    if length > limit:
        yield (
            f"{TOKENIZER_CONFIG} says model_max_length: {int(limit):,}, but "
            f"{CONFIG} allows {f'{longest:,}' if longest else 'any number of'} positions; {CONFIG} "
            f"counts, so --seq-length {length:,} is used"
        )


def _compare_weight_files(model_dir: Path) -> Iterator[str]:
    """Yield a line if a directory contains the weights twice, in one file and in shards."""
    if (model_dir / WEIGHTS).is_file() and (model_dir / INDEX).is_file():
        yield f"{WEIGHTS} and {INDEX} are both there; {WEIGHTS} counts, as in transformers"


def _compare_dtypes(model_dir: Path) -> Iterator[str]:
    """Yield a line if most weights have another dtype than config.json says."""
    content: dict[str, Any] = chat_files.read_object(model_dir / CONFIG)
    text = content.get("text_config")
    places = (content, text if isinstance(text, dict) else {})
    values = [part.get(key) for part in places for key in ("dtype", "torch_dtype")]
    declared = next((value for value in values if isinstance(value, str)), None)
    counts: Counter[str] = Counter()
    for name in list_weight_files(model_dir):
        try:
            header, _ = read_header(model_dir / name, (model_dir / name).stat().st_size)
        except (OSError, ValueError):
            return  # reported when the weights are read
        for tensor in header.values():
            start, end = tensor["data_offsets"]
            counts[FLOATING.get(tensor["dtype"], tensor["dtype"])] += end - start
    if not declared or not counts:
        return
    stored = counts.most_common(1)[0][0]
    if stored != declared.removeprefix("torch."):
        yield (
            f"{CONFIG} says dtype: {declared}, but the weights are {stored}; the weights "
            "count, and are read into float32 master weights"
        )
