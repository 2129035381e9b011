"""Checks that a directory is a whole model: config, weights and tokenizer that fit each other.

Reads the headers of the weights only, so it takes seconds and no memory at any size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib.core import log, publish, units
from lib.core.errors import ArtifactError, StageError
from lib.models import architecture, chat_files, keys, tokenizer
from lib.models.directory import rename_in_errors
from lib.models.tensors import FLOATING, Headers, read_index

_SHOWN = 20


@dataclass(frozen=True)
class ModelFacts:
    """Says what a model is: vocabulary, tokens and context are numbers of tokens.

    dtype: of the weights, or of the config where there are none. vocabulary: rows of the
    embedding. tokens: of the tokenizer.
    """

    parameters: int
    dtype: str
    vocabulary: int
    tokens: int
    context: int | None

    def summary(self) -> dict[str, Any]:
        """Return them as a manifest holds them."""
        return asdict(self)

    def print(self, target: Path, more: Mapping[str, str]) -> None:
        """Print what the model in a directory is. more: further rows."""
        unused = self.vocabulary - self.tokens
        log.table(
            {
                "model": target,
                "parameters": f"{self.parameters:,} ({units.count(self.parameters)}), {self.dtype}",
                "vocabulary": f"{self.vocabulary:,} rows, {self.tokens:,} tokens in the tokenizer"
                + (f" ({units.counted(unused, 'row')} to spare)" if unused else ""),
                "context": f"{self.context:,} tokens"
                if self.context
                else "not limited by the config",
                **more,
            }
        )


def examine(
    model_dir: Path,
    *,
    weights: bool,
    coming: Mapping[str, int] | None = None,
    trust_code: bool = False,
) -> ModelFacts:
    """Return the facts of a model directory; ArtifactError with all that does not fit.

    weights: there must be safetensors; otherwise there must be none. coming: of a directory in the
    making, the bytes of the files of which no more than the header is there; empty when nothing is
    known of the weights yet. trust_code: see architecture.read_config. Raises UsageError for a kind
    of model that cannot be trained, or a tokenizer that does not load.
    """
    is_ahead = coming is not None
    weights_known = coming is None or bool(coming)
    config = architecture.read_config(model_dir, trust_code)
    model = architecture.build_on_meta(model_dir, trust_code=trust_code)
    headers = _read_headers(model_dir, coming or {}) if weights_known else Headers()
    problems = headers.problems + chat_files.find_faults(model_dir)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if weights and weights_known:
        plan = keys.plan_loading(model, headers.shapes)
        problems += plan.problems + keys.list_wrong_dtypes(model, plan, headers.dtypes)
        used = {key for recipe in plan.recipes.values() for key in recipe.keys}
        stored = _main_dtype(headers, used) or dtype
        if config.dtype is not None and stored != dtype and not is_ahead:
            log.warn(f"config.json says {dtype}, the weights are {stored}")
        dtype = stored
    elif headers.files:
        problems.append(f"weights where none belong: {', '.join(set(headers.files.values()))}")
    rows = model.get_input_embeddings().weight.shape[0]
    loaded = tokenizer.load(model_dir)
    tokens = len(loaded)
    if tokens > rows:
        problems.append(
            f"the tokenizer has {tokens:,} tokens, the model only {rows:,} rows for them"
        )
    if problems:
        raise ArtifactError(
            f"the files of {model_dir} do not make a whole model",
            found=units.join_lines(problems, _SHOWN),
        )
    if (changed := tokenizer.find_losses(loaded, model_dir)) and not is_ahead:
        log.warn("the tokenizer does not give back every text as it was: " + "; ".join(changed[:2]))
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ModelFacts(model.num_parameters(), dtype, rows, tokens, context)


def examine_build(
    build: publish.Build, *, weights: bool, name: str, trust_code: bool = False
) -> ModelFacts:
    """Check the finished directory; what was fetched is kept also if it does not fit."""
    try:
        with rename_in_errors(name, build.dir):
            return examine(build.dir, weights=weights, trust_code=trust_code)
    except StageError:
        if build.resumable:
            log.info(
                f"kept in {build.partial}, so that the same command need not fetch it again; "
                "or delete that"
            )
        raise


def _read_headers(model_dir: Path, sizes: Mapping[str, int]) -> Headers:
    """Return the tensors in a directory's safetensors files, reading nothing but the headers.

    sizes: bytes that files will have of which the beginning is there.
    """
    headers = Headers()
    for path in sorted(model_dir.glob("*.safetensors")):
        headers.add(path, sizes.get(path.name) or path.stat().st_size)
    headers.compare(read_index(model_dir))
    return headers


def _main_dtype(headers: Headers, used: set[str]) -> str:
    """Return the dtype that most of the weights have, as torch calls it."""
    numbers: Counter[str] = Counter()
    for key in used:
        numbers[FLOATING.get(headers.dtypes[key], headers.dtypes[key])] += math.prod(
            headers.shapes[key]
        )
    return numbers.most_common(1)[0][0] if numbers else ""
