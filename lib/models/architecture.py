"""Reads the config of a model, and builds the causal language model of it without memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from lib.core import commands, log, records
from lib.core.errors import ArtifactError, UsageError
from lib.models import remote_code
from lib.models.directory import CONFIG

# The buffers that routers add to their scores for the choice of experts alone, in float32.
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
_MOST = 100_000  # of anything that a model has a number of


def read_config(model_dir: Path, trust_code: bool = False) -> PretrainedConfig:
    """Return the config of a model directory, reading nothing but its `config.json`.

    No code of the directory is run: an `auto_map` on a type that transformers knows is ignored.
    trust_code: code for another type is run, if stage 03 fetched it.
    Raises ArtifactError when config.json is missing or broken, UsageError for an unknown type or
    code that fails.
    """
    content = read_content(model_dir)
    _require_countable(model_dir / CONFIG, content)
    runs_code = (
        trust_code and remote_code.is_needed(content) and bool(remote_code.list_fetched(model_dir))
    )
    if not runs_code:
        _check_type(model_dir / CONFIG, content)
    try:
        return AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=runs_code
        )
    except Exception as error:  # each family checks its own fields, with errors of its own kind
        if runs_code:
            raise _code_failed(model_dir, error) from error
        raise ArtifactError(
            f"{model_dir / CONFIG} describes no {content['model_type']} model",
            found=_first_lines(error),
        ) from error


def read_content(model_dir: Path) -> dict[str, Any]:
    """Return the JSON object in `config.json`; ArtifactError when it is missing or broken."""
    path = model_dir / CONFIG
    try:
        content = records.read_json(path)
    except FileNotFoundError:
        raise ArtifactError(
            f"{model_dir} holds no model (no {CONFIG})", hint="stage 03 prepares one"
        ) from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    if not isinstance(content, dict):
        raise ArtifactError(
            f"{path} is damaged", expected="a JSON object", found=type(content).__name__
        )
    return content


def build_on_meta(
    model_dir: Path, attention: str = "sdpa", trust_code: bool = False
) -> PreTrainedModel:
    """Return the causal language model of a directory, in train mode, on the meta device.

    All parameters are float32 whatever the config's dtype, weights are tied as the config says,
    `use_cache` is off. `config.dtype` of the result is float32 too: an export must set its own.
    attention: a name of transformers' attention interface; a family without sdpa gets eager,
    with a warning. trust_code: as for read_config. Raises UsageError when the directory holds no
    causal language model, a quantised one, one that cannot be built, or code that fails.
    """
    config = read_config(model_dir, trust_code)
    runs_code = not type(config).__module__.startswith("transformers.models.")
    find_class = _find_custom_class if runs_code else _find_causal_class
    family = find_class(model_dir, config)
    if attention == "sdpa" and not getattr(family, "_supports_sdpa", True):
        log.warn(
            f"{config.model_type} has no sdpa attention: eager is used, which is slower and "
            "takes memory that grows with the square of the sequence length"
        )
        attention = "eager"
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
    except Exception as error:  # a family takes its fields as they are, whatever comes of it
        if runs_code:
            raise _code_failed(model_dir, error) from error
        raise UsageError(
            f"cannot build the {config.model_type} model of {model_dir} "
            f"with attention {attention!r}",
            found=_first_lines(error),
            expected="fields of config.json that fit each other",
        ) from error
    return model.train()


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the outermost modules that the family says not to split, by name, in order.

    These are the blocks of the network: what is sharded, checkpointed or initialised as one. A
    family that names none has the elements of its longest ModuleList.
    """
    wanted = set(model._no_split_modules or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # The whole line of classes, since fully_shard puts a class of its own in front.
        is_block = any(kind.__name__ in wanted for kind in type(module).__mro__)
        if is_block and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found or _find_longest_list(model)


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


def _require_countable(path: Path, content: dict[str, Any]) -> None:
    """Raise ArtifactError for so many layers, heads or experts that none could build them."""
    text = content.get("text_config")
    for key, value in (content | (text if isinstance(text, dict) else {})).items():
        if key.startswith(("num_", "n_")) and isinstance(value, int | float) and value > _MOST:
            raise ArtifactError(
                f"{path} asks for what no model has",
                found=f"{key}: {value}",
                expected=f"at most {_MOST:,}",
            )


def _check_type(path: Path, content: dict[str, object]) -> None:
    kind = content.get("model_type")
    if not kind or not isinstance(kind, str):
        raise ArtifactError(
            f"{path} names no model_type", expected="the config.json of a Hugging Face model"
        )
    if kind not in CONFIG_MAPPING:
        has_code = isinstance(content.get("auto_map"), dict)
        raise UsageError(
            f"transformers does not know models of type {kind!r}",
            found=f"{path}" + (", with code of its own (auto_map)" if has_code else ""),
            expected="a type that the installed transformers has",
            hint="the code that comes with a model is fetched by stage 03, and run by "
            f"it and by stages 04 and 05, only if {remote_code.OPTION} is typed: "
            "read the code first"
            if has_code
            else "",
        )


def _find_causal_class(model_dir: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that AutoModelForCausalLM takes; UsageError when that cannot be trained."""
    architectures = config.architectures if isinstance(config.architectures, list) else []
    named = ", ".join(map(str, architectures)) or "no architecture named"
    found = f"model_type {config.model_type}, {named}"
    # Encoders such as BERT have a causal class too, but look both ways unless `is_decoder` is set.
    both_ways = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_decoder", False
    )
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or both_ways
        or getattr(config, "is_encoder_decoder", False)
    ):
        raise UsageError(
            f"{model_dir} holds no causal language model",
            found=found,
            expected="a decoder such as Llama, Mistral, Qwen, Phi, Falcon or GPT-2",
        )
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"{model_dir} holds quantised weights, which cannot be trained",
            found=found,
            expected="the unquantised release of the same model",
        )
    family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return family[0] if isinstance(family, tuple) else family


def _find_custom_class(model_dir: Path, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a model that comes with its code."""
    log.warn(f"{config.model_type}: running the code that came with the model, in {model_dir}")
    try:
        return get_class_from_dynamic_module(
            config.auto_map["AutoModelForCausalLM"], str(model_dir)
        )
    except Exception as error:  # it is another's code
        raise _code_failed(model_dir, error) from error


def _code_failed(model_dir: Path, error: Exception) -> UsageError:
    """Return the error for code of a model that does not do what it should."""
    lacking = (
        re.search(r"pip install ([\w .-]*\w)", str(error))
        if isinstance(error, ImportError)
        else None
    )  # transformers looks for what a module imports
    package = lacking[1] if lacking else getattr(error, "name", None) or ""
    is_missing = bool(lacking) or isinstance(error, ModuleNotFoundError)
    return UsageError(
        f"the code that came with the model in {model_dir} fails",
        found=_first_lines(error),
        expected="code that works with the installed "
        "transformers and needs no package that is not here",
        run=commands.pip_install(*package.split()) if is_missing and package else "",
    )


def _first_lines(error: Exception) -> str:
    said = "\n".join(str(error).strip().splitlines()[:3])
    is_plain = isinstance(error, (ValueError, ImportError)) and said
    return said if is_plain else f"{type(error).__name__}: {said}".removesuffix(": ")
