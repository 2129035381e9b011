"""Read and check the directory of a LoRA adapter as PEFT writes it, without importing torch.

    adapter_config.json         rank, alpha, names of the linear layers, name of the base model
    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, in]
                                base_model.model.<layer>.lora_B.weight [out, rank]

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import commands, hashing, records, units
from lib.core.errors import ArtifactError, Problems, UsageError
from lib.models.directory import find_misplaced, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_PICKLE = "adapter_model.bin"
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; a, b = sys.argv[1:]; "
    "save_file({k: v.contiguous() for k, v in torch.load(a, weights_only=True).items()}, b)"
)
_KEY = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_(A|B)\.weight")
_RANK_DIM = {"A": 0, "B": 1}  # of A [rank, inputs] and B [outputs, rank]
_NUMBER = re.compile(r"\.(\d+)\.")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
# With an alpha outside of these limits, B A is 0 or infinite in some dtype.
ALPHAS = (1e-6, 1e6)
_SHOWN = 8
# The keys of a config (PEFT 0.21) that are read, and those that do not change W x + s B A x. Any
# other key that is set, now or in later versions, is refused.
_READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "peft_type", "bias", "init_lora_weights"}
_HARMLESS = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "eva_config",
    "runtime_config",
    "qalora_group_size",
}
# Initialisations that leave the base model unchanged. The others also change its weights.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")


class PeftAdapter(NamedTuple):
    """The settings and shapes of an adapter.

    shapes: (name of the linear layer, `A` or `B`) → shape. fingerprint: a digest of config and
    weights that does not depend on the path. modules: the names, or last parts of names, of the
    linear layers in its config; empty if the config selects layers in another way.
    """

    directory: Path
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    shapes: dict[tuple[str, str], tuple[int, ...]]
    fingerprint: str
    modules: tuple[str, ...] = ()

    @property
    def linears(self) -> list[str]:
        """Return the names of the linear layers that have this adapter, sorted."""
        return sorted({linear for linear, _ in self.shapes})

    @property
    def targets(self) -> str:
        """Return a regular expression that matches exactly these names."""
        return build_pattern(self.linears)


def build_pattern(names: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these names.

    It is short if the same names occur in several blocks.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    plain = []
    for name in names:
        if number := _NUMBER.search(name):
            before_and_after = name[: number.start()], name[number.end() :]
            layers.setdefault(before_and_after, []).append(int(number[1]))
        else:
            plain.append(re.escape(name))
    by_blocks: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (before, after), numbers in layers.items():
        by_blocks.setdefault((before, tuple(sorted(numbers))), []).append(re.escape(after))
    return "|".join(
        plain
        + [
            rf"{re.escape(before)}\.({'|'.join(map(str, numbers))})\.({'|'.join(sorted(afters))})"
            for (before, numbers), afters in by_blocks.items()
        ]
    )


def read_adapter(directory: Path) -> PeftAdapter:
    """Return the settings and shapes of the adapter in a directory.

    Raises UsageError with all reasons if it is not plain LoRA on linear layers, and ArtifactError
    for missing or damaged files.
    """
    content = _read_config(directory)
    _require_plain(directory, content)
    shapes = _read_shapes(directory, content["r"])
    digest = hashing.file_digest(directory / WEIGHTS, "sha256")
    return PeftAdapter(
        directory,
        content["r"],
        float(content["lora_alpha"]),
        float(content.get("lora_dropout") or 0.0),
        bool(content.get("use_rslora")),
        shapes,
        hashing.fingerprint([content, digest]),
        _list_target_modules(content),
    )


def _list_target_modules(content: dict[str, Any]) -> tuple[str, ...]:
    """Return the names in target_modules, or () if other settings limit them."""
    names = content.get("target_modules")
    limits = ("layers_to_transform", "layers_pattern", "exclude_modules")
    if not isinstance(names, list) or any(content.get(limit) for limit in limits):
        return ()
    return tuple(name for name in names if isinstance(name, str))


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        content = records.read_json(path)
    except OSError:
        raise ArtifactError(
            f"{directory} contains no adapter (no {CONFIG})",
            expected="a directory that PEFT or stage 05 with --adapter wrote",
        ) from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} is damaged", expected="a JSON object")
    if content.get("peft_type", "LORA") == "LORA" and not _has_valid_numbers(content):
        raise ArtifactError(
            f"{path} is damaged",
            expected="a whole number r, lora_alpha above 0 and lora_dropout below 1",
        )
    return content


def _has_valid_numbers(content: dict[str, Any]) -> bool:
    rank, alpha, dropout = (content.get(name, 0) for name in ("r", "lora_alpha", "lora_dropout"))
    return (
        type(rank) is int
        and type(alpha) in (int, float)
        and type(dropout) in (int, float)
        and rank > 0
        and 0 < alpha < math.inf
        and 0 <= dropout < 1
    )


def find_odd_alpha(alpha: float) -> str:
    """Return why an alpha is not accepted, or "" if it is."""
    smallest, largest = ALPHAS
    return (
        ""
        if smallest <= alpha <= largest
        else f"alpha must be between {smallest:g} and {largest:,.0f}, and is usually 1 to 4 times "
        "the rank"
    )


def _require_plain(directory: Path, content: dict[str, Any]) -> None:
    """Raise UsageError for a config that needs more than W x + s B A x."""
    problems = []
    if content.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type: {content['peft_type']}")
    if content.get("bias", "none") != "none":
        problems.append(f"bias: {content['bias']}, so biases were trained too")
    if content.get("init_lora_weights", True) not in _INITIAL:
        problems.append(
            f"init_lora_weights: {content['init_lora_weights']}, which may have "
            "changed the weights of the base model"
        )
    if reason := find_odd_alpha(content.get("lora_alpha", 1)):
        problems.append(f"lora_alpha: {content['lora_alpha']!r:.40}; {reason}")
    problems += [
        f"{name}: {value}"
        for name, value in sorted(content.items())
        if value and name not in _READ | _HARMLESS
    ]
    if problems:
        raise UsageError(
            f"the adapter in {directory} is not plain LoRA on linear layers",
            found=units.join_lines(problems, _SHOWN),
            expected="only A and B, with one rank and one alpha",
        )


def _read_shapes(directory: Path, rank: int) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shapes of A and B by layer, from the header of the weights."""
    path = directory / WEIGHTS
    if not path.is_file():
        if (directory / _PICKLE).is_file():
            raise UsageError(
                f"the adapter in {directory} is a pickle, which is never opened",
                expected=f"{WEIGHTS}, as PEFT writes it since version 0.6",
                found=_PICKLE,
                hint="the first command reads only tensors, and runs no code of the pickle:",
                run="\n".join(
                    (
                        commands.python("-c", _CONVERT, directory / _PICKLE, path),
                        commands.as_typed(),
                    )
                ),
            )
        raise ArtifactError(f"the adapter in {directory} is incomplete", found=f"no {WEIGHTS}")
    try:
        header, start = read_header(path, path.stat().st_size)
        if wrong := next(find_misplaced(header, _FLOATS, ""), ""):
            raise ValueError(wrong)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if start + max(ends, default=0) != path.stat().st_size:
            raise ValueError(
                f"{path.stat().st_size} bytes, but its header describes "
                f"{start + max(ends, default=0)}"
            )
        tensors = {key: (tuple(entry["shape"]), entry["dtype"]) for key, entry in header.items()}
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", found=str(error)) from None
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    problems = Problems()
    for key, (shape, dtype) in tensors.items():
        match = _KEY.fullmatch(key)
        if match and len(shape) == 2 and shape[_RANK_DIM[match[2]]] == rank and dtype in _FLOATS:
            shapes[match[1], match[2]] = shape
        else:
            problems.add(
                f"{path} contains {key} {list(shape)} in {dtype}, which is not A or B of a "
                f"linear layer at rank {rank}"
            )
    problems.raise_if_any()
    if not shapes:
        raise ArtifactError(f"{path} is incomplete", found="no tensors at all")
    missing = []
    for linear, part in shapes:
        other = "B" if part == "A" else "A"
        if (linear, other) not in shapes:
            missing.append(f"{linear} has no lora_{other}")
    if missing:
        raise ArtifactError(f"{path} is incomplete", found=units.join_lines(missing, _SHOWN))
    return shapes
