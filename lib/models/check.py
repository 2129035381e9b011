"""Check that config, weights and tokenizer in a directory are complete and fit together.

Only the headers of the weights are read, so the check takes seconds for models of any size.
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
from lib.models.directory import rename_in_errors, require_data
from lib.models.tensors import FLOATING, Headers, read_index

_SHOWN = 20


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model for the manifest and the summary of stage 03.

    dtype: the weights' dtype, or the config's if there are no weights. vocabulary: rows of the
    embedding. tokens: number of tokens in the tokenizer. context: tokens, or None for no limit.
    """

    parameters: int
    dtype: str
    vocabulary: int
    tokens: int
    context: int | None

    def summary(self) -> dict[str, Any]:
        """Return the entries for a manifest."""
        return asdict(self)

    def print(self, target: Path, more: Mapping[str, str]) -> None:
        """Print a table about the model in a directory. more: further rows."""
        unused = self.vocabulary - self.tokens
        log.table(
            {
                "model": target,
                "parameters": f"{self.parameters:,} ({units.count(self.parameters)}), {self.dtype}",
                "vocabulary": f"{self.vocabulary:,} rows, {self.tokens:,} tokens in the tokenizer"
                + (f" ({units.counted(unused, 'row')} unused)" if unused else ""),
                "context": f"{self.context:,} tokens"
                if self.context
                else "not limited by the config",
                **more,
            }
        )


def check_model(
    model_dir: Path,
    *,
    weights: bool,
    expected_sizes: Mapping[str, int] | None = None,
    trust_code: bool = False,
    has_tokenizer: bool = True,
) -> ModelFacts:
    """Return the properties of a model directory after checking its files.

    weights: whether safetensors must exist; otherwise they must not. expected_sizes: for a
    check before the weights are downloaded, the final size of each file whose header is already
    here, or {} if no header is. trust_code: see architecture.read_config. has_tokenizer: False for
    a model without a tokenizer; each row of its embedding counts as a token. Raises ArtifactError
    with all problems of the files, and UsageError for a kind of model that cannot be trained or a
    tokenizer that does not load.
    """
    is_preview = expected_sizes is not None
    weights_known = expected_sizes is None or bool(expected_sizes)
    require_data(model_dir)
    config = architecture.read_config(model_dir, trust_code)
    model = architecture.build_on_meta(model_dir, trust_code=trust_code)
    headers = _read_headers(model_dir, expected_sizes or {}) if weights_known else Headers()
    problems = headers.problems + chat_files.find_faults(model_dir)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if weights and weights_known:
        plan = keys.plan_loading(model, headers.shapes)
        problems += plan.problems + keys.list_wrong_dtypes(model, plan, headers.dtypes)
        used = {key for recipe in plan.recipes.values() for key in recipe.keys}
        stored = _main_dtype(headers, used) or dtype
        if config.dtype is not None and stored != dtype and not is_preview:
            log.warn(f"config.json says {dtype}, but the weights are {stored}")
        dtype = stored
    elif headers.files:
        problems.append(f"unexpected weights: {', '.join(set(headers.files.values()))}")
    rows = model.get_input_embeddings().weight.shape[0]
    loaded = tokenizer.load_tokenizer(model_dir) if has_tokenizer else None
    tokens = rows if loaded is None else len(loaded)
    if tokens > rows:
        problems.append(
            f"the tokenizer has {tokens:,} tokens, but the model has only {rows:,} rows for them"
        )
    if problems:
        raise ArtifactError(
            f"the files of {model_dir} are not a complete model",
            found=units.join_lines(problems, _SHOWN),
        )
    changed = tokenizer.find_losses(loaded, model_dir) if loaded else []
    if changed and not is_preview:
        log.warn("the tokenizer does not decode every text unchanged: " + "; ".join(changed[:2]))
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ModelFacts(model.num_parameters(), dtype, rows, tokens, context)


def check_build(
    build: publish.Build,
    *,
    weights: bool,
    name: str,
    trust_code: bool = False,
    has_tokenizer: bool = True,
) -> ModelFacts:
    """Check a model before it is published. If it fails, downloaded files are kept."""
    try:
        with rename_in_errors(name, build.dir):
            return check_model(
                build.dir, weights=weights, trust_code=trust_code, has_tokenizer=has_tokenizer
            )
    except StageError:
        if build.resumable:
            log.info(
                f"the downloaded files are kept in {build.partial}, so that the same command need "
                "not download them again; delete this directory if you do not need them"
            )
        raise


def _read_headers(model_dir: Path, sizes: Mapping[str, int]) -> Headers:
    """Return the headers of all safetensors files in a directory.

    sizes: final size in bytes of each file that is not downloaded completely.
    """
    headers = Headers()
    for path in sorted(model_dir.glob("*.safetensors")):
        headers.add(path, sizes.get(path.name) or path.stat().st_size)
    headers.compare(read_index(model_dir))
    return headers


def _main_dtype(headers: Headers, used: set[str]) -> str:
    """Return torch's name of the dtype that most elements have, or "" if there are none.

    used: the keys of the weights that the model uses. Other weights are not counted.
    """
    counts: Counter[str] = Counter()
    for key in used:
        counts[FLOATING.get(headers.dtypes[key], headers.dtypes[key])] += math.prod(
            headers.shapes[key]
        )
    return counts.most_common(1)[0][0] if counts else ""
