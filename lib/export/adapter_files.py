"""Write a LoRA adapter as PEFT does, which vLLM and others load too (see peft_adapter)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from lib.core import commands, manifest, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.export.lora_run import LoraRun
from lib.models import directory, lora, lora_targets, peft_adapter
from lib.models.lora import Lora
from lib.models.peft_adapter import CONFIG, PREFIX, WEIGHTS
from lib.models.tensor_file import Entry, TensorFile, make_read_back_error

_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # on the Hub
_CACHED = re.compile(r"models--(.+?)--(.+)")
_SHOWN = 8


def plan_adapter(lora_run: LoraRun, dtype: torch.dtype) -> list[Entry]:
    """Return the tensors of the file, in writing order.

    Raises UsageError if the run adapts experts that share one tensor: runtimes silently ignore such
    adapters, or load them transposed.
    """
    if fused := [name for name, shape in lora_run.shapes.items() if len(shape) > 2]:
        raise UsageError(
            "adapters of fused experts cannot be exported alone: no runtime is known "
            "to load them correctly",
            found=units.join_lines(fused, _SHOWN),
            hint="to export the merged model instead:",
            run=commands.as_typed(drop=["--adapter"]),
        )
    return [Entry(PREFIX + name, shape, dtype) for name, shape in lora_run.shapes.items()]


def write_adapter(
    lora_run: LoraRun, entries: list[Entry], out: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Write config and tensors into `out`, read the tensors back, and return manifest entries.

    Raises ArtifactError if the file does not read back as it was written.
    """
    manifest.write_json(out / CONFIG, make_config(lora_run))
    with TensorFile(out / WEIGHTS, entries) as file:
        for entry in entries:
            file.add(lora_run.tensors[entry.key.removeprefix(PREFIX)], entry.dtype)
            advance(entry.bytes)
    if not file.reads_back():
        raise make_read_back_error(file.path)
    return [manifest.file_entry(out, out / CONFIG, "sha256"), file.manifest_entry()]


def make_config(lora_run: LoraRun) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    settings = lora_run.lora
    linears = lora_targets.choose_linears(lora_run.plain, lora_run.lora.targets)
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": name_base_model(lora_run.base.directory),
        "bias": "none",
        "fan_in_fan_out": any(
            lora_targets.is_transposed(lora_run.plain.get_submodule(name)) for name in linears
        ),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": settings.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": name_targets(lora_run.plain, linears),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": settings.rslora,
    }


def name_targets(model: PreTrainedModel, linears: Collection[str]) -> list[str]:
    """Return target names by which PEFT finds exactly these linear layers of a model.

    Uses the last parts of the names, such as `q_proj`, if no other module's name ends in one of
    them; otherwise uses the full names.
    """
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    is_exact = find_targets(model, leaves) == set(linears)
    return leaves if is_exact else sorted(linears)


def find_targets(model: PreTrainedModel, targets: Collection[str]) -> set[str]:
    """Return the modules of a model whose names end in a target, to which PEFT adds adapters."""
    return {
        name
        for name, _ in model.named_modules()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


def name_base_model(model_dir: Path) -> str:
    """Return the name of a model on the Hub, or of its directory if it has none there.

    Never returns a path: it would be invalid on other machines, and reveal who made the adapter.
    """
    content = manifest.read_if_any(model_dir) or {}
    name = content.get("options", {}).get("model_name")
    if content.get("kind") == directory.KIND and isinstance(name, str) and _NAME.fullmatch(name):
        return name
    matches = map(_CACHED.fullmatch, model_dir.absolute().parts)
    cached = next(filter(None, matches), None)
    return f"{cached[1]}/{cached[2]}" if cached else model_dir.resolve().name


def read_back(plain: PreTrainedModel, out: Path) -> tuple[Lora, dict[str, Tensor]]:
    """Return the settings and tensors of an adapter that was just written, as PEFT reads them."""
    content = records.read_json(out / CONFIG)
    linears = find_targets(plain, content["target_modules"])
    settings = Lora(
        content["r"],
        content["lora_alpha"],
        content["lora_dropout"],
        peft_adapter.build_pattern(sorted(linears)),
        content["use_rslora"],
    )
    with safe_open(out / WEIGHTS, "pt") as file:
        keys = list(file.keys())  # the file itself is not iterable
        return settings, {key.removeprefix(PREFIX): file.get_tensor(key) for key in keys}


def verify_adapter(lora_run: LoraRun, out: Path) -> None:
    """Compare the names and shapes in the files with those that PEFT creates from the config.

    Raises ArtifactError if anything differs, because PEFT silently ignores unexpected tensors.
    """
    content = records.read_json(out / CONFIG)
    expected: dict[str, tuple[int, ...]] = {}
    for name in find_targets(lora_run.plain, content["target_modules"]):
        rows, inputs = lora_targets.count_features(lora_run.plain.get_submodule(name))
        expected |= {
            f"{PREFIX}{name}.{lora.A}.weight": (content["r"], inputs),
            f"{PREFIX}{name}.{lora.B}.weight": (rows, content["r"]),
        }
    with safe_open(out / WEIGHTS, "pt") as file:
        keys = list(file.keys())  # the file itself is not iterable
        written = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    if differences := [
        f"{key}: expected {expected.get(key)}, written {written.get(key)}"
        for key in sorted(expected.keys() | written.keys())
        if expected.get(key) != written.get(key)
    ]:
        raise ArtifactError(
            "the adapter contains other tensors than PEFT expects",
            found=units.join_lines(differences, _SHOWN),
        )
