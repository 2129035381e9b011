"""`--lora-from`: a run that begins with an adapter which is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.core import declared
from lib.core.errors import Problems
from lib.models import peft_adapter
from lib.models.peft_adapter import PeftAdapter
from lib.train.config import DEFAULTS, Config

INPUT = "adapter"  # among those of a run's identity
_WHY = "--lora-from"
_OF_ADAPTER = ("lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "lora_dropout")


def find(directory: Path | None, identity: dict[str, Any]) -> PeftAdapter | None:
    """Return the adapter that a run begins with; None without one, or where a run that has begun
    holds it already and the directory is gone.

    identity: of the run that has begun, or {}. Raises UsageError or ArtifactError as
    `peft_adapter.read_adapter`.
    """
    if directory is None or (not directory.exists() and INPUT in identity.get("inputs", {})):
        return None
    return peft_adapter.read_adapter(directory)


def fingerprint(
    config: Config, adapter: PeftAdapter | None, identity: dict[str, Any]
) -> dict[str, str]:
    """Return what the identity of a run holds of the adapter that it begins with."""
    if config.lora_from is None:
        return {}
    return {INPUT: adapter.fingerprint if adapter else identity["inputs"][INPUT]}


def settle(config: Config, adapter: PeftAdapter | None, identity: dict[str, Any]) -> Config:
    """Return the options with those of the adapter that a run begins with.

    adapter, identity: see `find`. Raises UsageError that tells all that was typed otherwise.
    """
    if config.lora_from is None:
        return config
    own = _options(adapter, identity)
    problems = Problems()
    kept = {}
    for name in _OF_ADAPTER:
        typed = getattr(config, name)
        default = getattr(DEFAULTS, name)
        if typed == default != own[name]:
            kept[name] = own[name]
        elif typed not in (default, own[name]) and name != "lora_dropout":  # of training alone
            problems.add(
                f"{declared.flag(name)} {typed} is not that of {config.lora_from}",
                found=str(own[name]),
                hint="leave it out: an adapter keeps what it has",
            )
    problems.raise_if_any()
    return config.with_values(_WHY, **kept)


def _options(adapter: PeftAdapter | None, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the adapter, or where that is gone, of the run that holds it."""
    if adapter is None:
        return {
            name: identity["options"].get(name, getattr(DEFAULTS, name)) for name in _OF_ADAPTER
        }
    return {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_targets": adapter.targets,
        "lora_rslora": adapter.rslora,
        "lora_dropout": adapter.dropout,
    }
