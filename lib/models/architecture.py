"""Read the config of a model, and build the model on the meta device, where it needs no memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lib.core import commands, log, records
from lib.core.errors import ArtifactError, UsageError
from lib.models import remote_code
from lib.models.directory import CONFIG, read_shapes

# Float32 buffers that routers add to their scores, only to choose experts.
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
_TIE = "tie_word_embeddings"
_TYING_REPORTED: set[Path] = set()  # models whose keys differ, which is reported once
_LARGEST_COUNT = 100_000  # layers, heads or experts that a config may name


def read_config(model_dir: Path, trust_code: bool = False) -> PretrainedConfig:
    """Return the config of a model directory. Reads only `config.json`.

    `auto_map` is ignored for types that transformers supports. trust_code: for other types, run the
    code that stage 03 has downloaded. Raises ArtifactError if config.json is missing or damaged,
    and UsageError for an unknown type or if the code fails.
    """
    content = read_config_json(model_dir)
    _require_possible_counts(model_dir / CONFIG, content)
    runs_code = (
        trust_code
        and remote_code.is_needed(content)
        and bool(remote_code.list_code_files(model_dir))
    )
    if not runs_code:
        _check_type(model_dir / CONFIG, content)
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=runs_code
        )
    except Exception as error:  # each family checks its fields and raises its own errors
        if runs_code:
            raise _code_error(model_dir, error) from error
        raise ArtifactError(
            f"{model_dir / CONFIG} is not the config of a {content['model_type']} model",
            found=_first_lines(error),
        ) from error
    text = content.get("text_config")
    if isinstance(text, dict) and isinstance(content.get(_TIE), bool):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = content[_TIE]
    return config


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """Return the JSON object in `config.json`, in which the keys about tied embeddings agree.

    Raises ArtifactError if it is missing or damaged.
    """
    path = model_dir / CONFIG
    try:
        content = records.read_json(path)
    except FileNotFoundError:
        raise ArtifactError(
            f"{model_dir} contains no model (no {CONFIG})", hint="stage 03 prepares one"
        ) from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    if not isinstance(content, dict):
        raise ArtifactError(
            f"{path} is damaged", expected="a JSON object", found=type(content).__name__
        )
    tied = _decide_tying(model_dir, content)
    text = {"text_config": content["text_config"] | {_TIE: tied}} if tied is not None else {}
    return content | text | ({_TIE: tied} if text else {})


def _decide_tying(model_dir: Path, content: dict[str, Any]) -> bool | None:
    """Return whether embeddings are tied if config.json and its text_config differ, else None.

    The files decide, since the model was saved so; without weights, the outer key counts, as in
    transformers 5.
    """
    text = content.get("text_config")
    values = [content.get(_TIE), text.get(_TIE) if isinstance(text, dict) else None]
    if values not in ([True, False], [False, True]):
        return None
    names = read_shapes(model_dir)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    tied = not has_head if names else bool(values[0])
    if log.rank() == 0 and model_dir not in _TYING_REPORTED:
        _TYING_REPORTED.add(model_dir)
        reason = f"the weights contain {'an' if has_head else 'no'} lm_head"
        log.detail(
            f"{model_dir / CONFIG}: tie_word_embeddings is {values[0]}, in its text_config "
            f"{values[1]}; {reason if names else 'the first counts'}, so the embeddings are "
            f"{'tied' if tied else 'not tied'}"
        )
    return tied


def build_on_meta(
    model_dir: Path,
    attention: str = "sdpa",
    trust_code: bool = False,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Return the causal language model of a directory, on the meta device and in train mode.

    All parameters and `config.dtype` are float32, whatever the dtype in config.json, so an export
    must set its dtype itself. Weights are tied as the config says, and `use_cache` is off.
    attention: a name in transformers' attention interface; for a family without sdpa, eager is used
    instead of sdpa and varlen, with a warning. trust_code: see `read_config`. config: used instead
    of that of the directory, and changed. Raises UsageError if the directory does not contain a
    causal language model, if it is quantised or cannot be built, or if its code fails.
    """
    config = config or read_config(model_dir, trust_code)
    runs_code = not type(config).__module__.startswith("transformers.models.")
    find_class = _find_custom_class if runs_code else _find_causal_class
    family = find_class(model_dir, config)
    if attention in ("sdpa", "varlen") and not getattr(family, "_supports_sdpa", True):
        if log.rank() == 0 and has_attention(config):
            log.warn(
                f"{config.model_type} does not support {attention} attention; eager attention is "
                "used, which is slower and needs memory that grows with the square of the sequence "
                "length"
            )
        attention = "eager"  # with varlen, transformers would make no causal mask
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=runs_code,
            )
    except Exception as error:  # many families do not check their fields
        if runs_code:
            raise _code_error(model_dir, error) from error
        raise UsageError(
            f"cannot build the {config.model_type} model of {model_dir} "
            f"with attention {attention!r}",
            found=_first_lines(error),
            expected="fields of config.json that fit together",
        ) from error
    return model.train()


def has_attention(config: PretrainedConfig) -> bool:
    """Return whether a family has attention; Mamba, for example, has none."""
    names = list_names(config)
    return not names or any(name.endswith("Attention") for name in names)


def list_names(config: PretrainedConfig) -> list[str]:
    """Return the names in transformers' module of a family; none for a model with its own code."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return list(vars(sys.modules[family.__module__])) if family else []


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in order.

    Blocks are the outermost modules whose classes the family lists in `_no_split_modules`. If there
    are none, blocks are the elements of the model's longest ModuleList. Each block is sharded,
    recomputed and initialised as one unit.
    """
    block_classes = set(model._no_split_modules or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # Base classes are searched too, because fully_shard replaces the class by a subclass.
        is_block = any(kind.__name__ in block_classes for kind in type(module).__mro__)
        if is_block and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks[name] = module
    return blocks or _find_longest_list(model)


def _find_longest_list(model: PreTrainedModel) -> dict[str, nn.Module]:
    lists = [
        (len(module), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        return {}
    _, name, longest = max(lists, key=lambda entry: entry[0])
    return {f"{name}.{i}": block for i, block in enumerate(longest)}


def _require_possible_counts(path: Path, content: dict[str, Any]) -> None:
    """Raise ArtifactError for more layers, heads or experts than any machine could build."""
    text = content.get("text_config")
    for key, value in (content | (text if isinstance(text, dict) else {})).items():
        is_count = key.startswith(("num_", "n_")) and isinstance(value, int | float)
        if is_count and value > _LARGEST_COUNT:
            raise ArtifactError(
                f"{path} contains an impossible number",
                found=f"{key}: {value}",
                expected=f"at most {_LARGEST_COUNT:,}",
            )


def _check_type(path: Path, content: dict[str, object]) -> None:
    kind = content.get("model_type")
    if not kind or not isinstance(kind, str):
        raise ArtifactError(
            f"{path} has no model_type", expected="the config.json of a Hugging Face model"
        )
    if kind not in CONFIG_MAPPING:
        has_code = isinstance(content.get("auto_map"), dict)
        raise UsageError(
            f"transformers does not know models of type {kind!r}",
            found=f"{path}" + (", with its own code (auto_map)" if has_code else ""),
            expected="a type that the installed transformers supports",
            hint="stage 03 downloads the code of the model, and stages 03, 04 and 05 run it, only "
            f"with {remote_code.OPTION}. Read the code first"
            if has_code
            else "",
        )


def _find_causal_class(model_dir: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that AutoModelForCausalLM uses.

    Raises UsageError if the model is not a causal language model or has quantised weights.
    """
    architectures = config.architectures if isinstance(config.architectures, list) else []
    names = ", ".join(map(str, architectures)) or "no architecture named"
    found = f"model_type {config.model_type}, {names}"
    # Encoders such as BERT have a causal class too, but are bidirectional without `is_decoder`.
    is_bidirectional = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        config, "is_decoder", False
    )
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or is_bidirectional
        or getattr(config, "is_encoder_decoder", False)
    ):
        raise UsageError(
            f"{model_dir} contains no causal language model",
            found=found,
            expected="a decoder such as Llama, Mistral, Qwen, Phi, Falcon or GPT-2",
        )
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"{model_dir} contains quantised weights, which cannot be trained",
            found=found,
            expected="the unquantised release of the same model",
        )
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return family[0] if isinstance(family, tuple) else family


def _find_custom_class(model_dir: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a model that has its own code."""
    if log.rank() == 0:
        log.warn(f"{config.model_type}: running the model's own code in {model_dir}")
    try:
        return get_class_from_dynamic_module(
            config.auto_map["AutoModelForCausalLM"], str(model_dir)
        )
    except Exception as error:  # the code may raise anything
        raise _code_error(model_dir, error) from error


def _code_error(model_dir: Path, error: Exception) -> UsageError:
    """Return the error for a failure in the model's own code."""
    # transformers checks what a module imports, and suggests to install missing packages.
    suggestion = (
        re.search(r"pip install ([\w .-]*\w)", str(error))
        if isinstance(error, ImportError)
        else None
    )
    package = suggestion[1] if suggestion else getattr(error, "name", None) or ""
    is_missing = bool(suggestion) or isinstance(error, ModuleNotFoundError)
    return UsageError(
        f"the model's own code in {model_dir} fails",
        found=_first_lines(error),
        expected="code that works with the installed transformers and packages",
        run=commands.pip_install(*package.split()) if is_missing and package else "",
    )


def _first_lines(error: Exception) -> str:
    """Return the first lines of an error's message.

    They follow the type of the error, unless it is a ValueError or ImportError with a message.
    """
    text = "\n".join(str(error).strip().splitlines()[:3])
    is_plain = isinstance(error, (ValueError, ImportError)) and text
    return text if is_plain else f"{type(error).__name__}: {text}".removesuffix(": ")
