"""Is this directory a whole model: config, weights and tokenizer that fit each other.

Reads the headers of the weights only, so it takes seconds and no memory at any size.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lib.core import log, records
from lib.core.errors import ArtifactError
from lib.models import architecture, keys, tokenizer, training_memory
from lib.models.identity import INDEX, LARGEST_HEADER

_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
               "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_SHOWN = 20


@dataclass(frozen=True)
class Facts:
    """What a model is: vocabulary, tokens and context are numbers of tokens.

    dtype: of the weights, or of the config where there are none. vocabulary: rows of the
    embedding. tokens: of the tokenizer. memory: of a GPU, for training.
    """

    parameters: int
    dtype: str
    vocabulary: int
    tokens: int
    context: int | None
    memory: training_memory.Estimate

    def summary(self) -> dict[str, Any]:
        """Return them as a manifest holds them."""
        return {**asdict(self), "memory": {str(n): b for n, b in self.memory.per_gpu.items()}}


@dataclass
class Headers:
    """What the headers of a directory's safetensors files say, by tensor name."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def examine(model_dir: Path, *, weights: bool, coming: Mapping[str, int] | None = None,
            trust_code: bool = False) -> Facts:
    """Return the facts of a model directory; ArtifactError with all that does not fit.

    weights: there must be safetensors; otherwise there must be none. coming: of a directory in the
    making, the bytes of the files of which no more than the header is there; empty when nothing is
    known of the weights yet. trust_code: see architecture.read_config. Raises UsageError for a kind
    of model that cannot be trained, or a tokenizer that does not load.
    """
    is_ahead, weights_known = coming is not None, coming is None or bool(coming)
    config = architecture.read_config(model_dir, trust_code)
    model = architecture.build_on_meta(model_dir, trust_code=trust_code)
    headers = read_headers(model_dir, coming or {}) if weights_known else Headers()
    problems, dtype = headers.problems, str(config.dtype or "float32").removeprefix("torch.")
    if weights and weights_known:
        plan = keys.load_plan(model, headers.shapes)
        problems += plan.problems + _wrong_dtypes(model, plan, headers)
        used = {key for recipe in plan.recipes.values() for key in recipe.names()}
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
        problems.append(f"the tokenizer has {tokens:,} tokens, the model only {rows:,} rows for "
                        "them")
    if problems:
        shown = problems[:_SHOWN] + ([f"… and {len(problems) - _SHOWN} more"]
                                     if problems[_SHOWN:] else [])
        raise ArtifactError(f"the files of {model_dir} do not make a whole model",
                            found="\n".join(shown))
    if (changed := tokenizer.lossy(loaded, model_dir)) and not is_ahead:
        log.warn("the tokenizer does not give back every text as it was: "
                 + "; ".join(changed[:2]))
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return Facts(sum(p.numel() for p in model.parameters()), dtype, rows, tokens, context,
                 training_memory.estimate(model))


def read_headers(model_dir: Path, sizes: Mapping[str, int]) -> Headers:
    """Return the tensors in a directory's safetensors files, reading nothing but the headers.

    sizes: bytes that files will have of which the beginning is there.
    """
    headers = Headers()
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            header, data_bytes = _header(path, sizes.get(path.name) or path.stat().st_size)
            _add(headers, path.name, header, data_bytes)
        except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            headers.problems.append(f"{path.name} is damaged: {error}")
    index = model_dir / INDEX
    if index.is_file():
        weight_map = records.read_json(index)["weight_map"]
        headers.problems += [f"{key} is not in {file}, where the index has it"
                             for key, file in weight_map.items() if headers.files.get(key) != file]
    return headers


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return a file's header and the bytes of data after it; ValueError when it has none.

    The format: 8 bytes little-endian length, that much JSON, data
    (https://huggingface.co/docs/safetensors, "Format").
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"its header would take {length} of {size} bytes")
        header = records.parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, size - 8 - length


def _add(headers: Headers, file: str, header: dict[str, Any], data_bytes: int) -> None:
    """Add the tensors of one file and note where header and size contradict each other."""
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, dtype, (first, last) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
        expected = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
        if first != end or (expected and last - first != expected):
            headers.problems.append(f"{key} in {file} lies at bytes {first} to {last}, expected "
                                    f"{end} to {end + expected}")
        if key in headers.shapes:
            headers.problems.append(f"{key} is in both {headers.files[key]} and {file}")
        end = last
        headers.shapes[key], headers.dtypes[key], headers.files[key] = shape, dtype, file
    if end != data_bytes:
        headers.problems.append(f"{file} is {'truncated' if data_bytes < end else 'too long'}: "
                                f"{data_bytes} bytes of data, its header says {end}")


def _wrong_dtypes(model: PreTrainedModel, plan: keys.LoadPlan, headers: Headers) -> list[str]:
    """Return a sentence for each tensor that is of another kind of numbers than the model's."""
    tensors = model.state_dict(keep_vars=True)
    return sorted(
        f"{key}: expected {'floating-point numbers' if is_float else 'whole numbers'}, "
        f"found {headers.dtypes[key]}"
        for name, recipe in plan.recipes.items()
        for is_float in [tensors[name].is_floating_point()]
        for key in recipe.names() if (headers.dtypes[key] in _FLOATING) != is_float)


def _main_dtype(headers: Headers, used: set[str]) -> str:
    """Return the dtype that most of the weights have, as torch calls it."""
    numbers: Counter[str] = Counter()
    for key in used:
        numbers[_FLOATING.get(headers.dtypes[key], headers.dtypes[key])] += \
            math.prod(headers.shapes[key])
    return numbers.most_common(1)[0][0] if numbers else ""
