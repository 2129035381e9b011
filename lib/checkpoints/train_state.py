"""train_state.json of a checkpoint: all state that is not a tensor, with the types it must have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.core import records
from lib.core.errors import ArtifactError


def read(path: Path) -> dict[str, Any]:
    """Return what the file holds; ArtifactError when a value has another type than is written.

    Values that are not there are for those who need them to miss.
    """
    content = records.read_json(path)
    if not isinstance(content, dict):
        wrong = [path.name]
    else:
        wrong = [key for key, is_sound in _SOUND.items()
                 if key in content and not is_sound(content[key])]
    if wrong:
        raise ArtifactError(f"{path} is not one that stage 04 wrote",
                            found=f"values of another type: {', '.join(wrong)}")
    return content


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _all(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(
        type(each) in kinds for each in value.values())


_SOUND: dict[str, Callable[[Any], bool]] = dict.fromkeys((
    "step", "tokens", "samples", "seed", "total_steps", "world_size", "bad_steps", "rollbacks",
    "optimizer_steps"), _is_count) | {
    "loss_scale": _all(int, float), "model_files": _all(str),
    "cursors": lambda value: isinstance(value, list) and all(map(_all(int, type(None)), value))}
