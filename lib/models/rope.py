"""Extend the context of a model: change the RoPE settings in its config.

The files of the model stay as they are. A run builds the model from the changed config, and keeps
that config for its exports, so both have the same settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from lib.core import manifest, units
from lib.core.errors import UsageError
from lib.models import architecture, dialects, remote_code
from lib.models.directory import CONFIG, rename_in_errors
from lib.models.options import ModelOptions

_TEXT = "text_config"  # in models that also read images
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LONGEST = "max_position_embeddings"
_ORIGINAL = f"original_{_LONGEST}"
_TYPE = "rope_type"
_BASE = "rope_theta"
_SHARE = "partial_rotary_factor"
# By rope_type: the settings that we keep or change. Other types compute something else.
_SETTINGS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        }
    ),
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of Llama 3.1


@dataclass(frozen=True)
class RopeSettings:
    """The RoPE settings that a run asks for.

    theta: the base, None for that of the model. scaling: "" for that of the model, or
    TYPE:FACTOR[:ORIGINAL]. length: tokens of a sample, 0 if unknown.
    """

    theta: float | None
    scaling: str
    length: int

    @classmethod
    def from_options(cls, options: ModelOptions, length: int | None) -> RopeSettings:
        """Return the settings of a run. length: its --seq-length, None if it is open."""
        return cls(options.rope_theta, options.rope_scaling, length or 0)

    @property
    def changes(self) -> bool:
        """Return whether the run asks for other settings than the model's."""
        return bool(self.theta or self.scaling)

    def __str__(self) -> str:
        """Return the options."""
        theta = [f"--rope-theta {self.theta:g}"] if self.theta else []
        return " ".join(theta + ([f"--rope-scaling {self.scaling}"] if self.scaling else []))

    def extend(self, current: Mapping[str, Any], longest: int) -> tuple[dict[str, Any], int]:
        """Return the new values of `rope_parameters` and `max_position_embeddings`.

        current, longest: their values now. Settings of a scaling of the same type stay, apart from
        its factor. The context never becomes shorter.
        """
        rope = dict(current)
        if self.theta:
            rope[_BASE] = self.theta
        if not self.scaling:
            return rope, max(longest, self.length)
        kind, factor, *rest = self.scaling.split(":")
        original = rope.get(_ORIGINAL) or longest
        if rope[_TYPE] == "linear":
            original = round(longest / rope["factor"])
        if rest:
            original = int(rest[0])
        if rope[_TYPE] != kind:
            rope = {key: rope[key] for key in (_BASE, _SHARE) if key in rope} | {_TYPE: kind}
        rope["factor"] = float(factor)
        if kind != "linear":
            rope[_ORIGINAL] = original
        if kind == "llama3":
            rope = _LLAMA3 | rope
        return rope, max(longest, round(float(factor) * original))


def read_config(model_dir: Path, trust_code: bool, settings: RopeSettings) -> PretrainedConfig:
    """Return the config of a model with the RoPE settings of a run.

    Raises UsageError if they cannot be changed for this family, and the errors of
    `architecture.read_config`.
    """
    if not settings.changes:
        return architecture.read_config(model_dir, trust_code)
    config = _read_content(read_config_json(model_dir, settings))
    config.name_or_path = str(model_dir)
    return config


def read_config_json(model_dir: Path, settings: RopeSettings) -> dict[str, Any]:
    """Return the JSON object in `config.json` with the RoPE settings of a run.

    If the model has these settings already, the object is unchanged. Raises UsageError if they
    cannot be changed for this family, or if its config cannot express them.
    """
    content = architecture.read_config_json(model_dir)
    if not settings.changes:
        return content
    if remote_code.is_needed(content):
        raise _make_error(settings, str(content["model_type"]), "a model with its own code")
    config = architecture.read_config(model_dir)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    current = {k: v for k, v in parameters.get(_FULL, parameters).items() if k != "type"}
    longest: int = getattr(text, _LONGEST, None) or 0
    if problem := _find_problem(text.model_type, parameters, longest, settings):
        raise _make_error(settings, text.model_type, problem)
    rope, length = settings.extend(current, longest)
    if (rope, length) == (current, longest):
        return content
    changes = {
        "rope_parameters": {**parameters, _FULL: rope} if _FULL in parameters else rope,
        _LONGEST: length,
    }
    part = content.get(_TEXT)
    if isinstance(part, dict) and text is not config:
        extended = content | {_TEXT: _replace(part, changes)}
    else:
        extended = _replace(content, changes)
    text = _read_content(extended).get_text_config()
    if any(getattr(text, name) != value for name, value in changes.items()):
        raise _make_error(
            settings, text.model_type, f"a config that reads as {text.rope_parameters}"
        )
    return extended


def require_used(model: PreTrainedModel, settings: RopeSettings) -> None:
    """Raise UsageError if a run asks for RoPE settings, but no module of its model reads them."""
    has_rope = any(hasattr(module, _TYPE) for module in model.modules())
    if settings.changes and (not has_rope or getattr(model.config, "alibi", False)):
        raise _make_error(settings, model.config.model_type, "a model that does not use RoPE")


def describe(config: PretrainedConfig, settings: RopeSettings) -> dict[str, str]:
    """Return a row about the RoPE settings of a run, {} if it keeps those of the model.

    config: of the model as the run builds it.
    """
    if not settings.changes:
        return {}
    text = config.get_text_config()
    rope = text.rope_parameters.get(_FULL, text.rope_parameters)
    original = f" of {units.counted(rope[_ORIGINAL], 'token')}" if _ORIGINAL in rope else ""
    scaling = "not scaled" if rope[_TYPE] == "default" else f"{rope[_TYPE]} × {rope['factor']:g}"
    return {
        "RoPE": f"base {rope[_BASE]:,.10g}, {scaling}{original}; the context becomes "
        f"{units.counted(text.max_position_embeddings, 'token')} ({settings})"
    }


def _find_problem(
    family: str, parameters: Mapping[str, Any], longest: int, settings: RopeSettings
) -> str:
    """Return why the settings of a family cannot be changed, "" if they can.

    parameters: `rope_parameters` as transformers 5 reads them, perhaps by kind of layer.
    """
    by_layer = {key for key, value in parameters.items() if isinstance(value, dict)}
    rope = parameters.get(_FULL, parameters)
    kind = rope.get(_TYPE)
    if not rope or not longest:
        return "a config without RoPE settings, or without a longest position"
    if by_layer and not {_FULL} <= by_layer <= {_FULL, _SLIDING}:
        return f"settings for layers of the kinds {', '.join(sorted(by_layer))}"
    if kind not in _SETTINGS:
        return f"RoPE of the type {kind}"
    if unknown := rope.keys() - _SETTINGS[kind] - {_TYPE, "type", _BASE, _SHARE}:
        return f"unknown settings: {', '.join(sorted(unknown))}"
    keys = dialects.ROPE_KEYS.get(family, dialects.RopeKeys())
    if keys is None or (settings.scaling and not (keys.scales and keys.kind == _TYPE)):
        return "a config in which transformers 4 does not read these settings"
    return ""


def _replace(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a language model with other settings, for transformers 4 and 5."""
    kept = {key: value for key, value in content.items() if key != "rope_scaling"}
    return dialects.add_earlier_keys({**kept, **changes})


def _read_content(content: Mapping[str, Any]) -> PretrainedConfig:
    """Return a config as transformers reads it from a directory with this config.json."""
    with tempfile.TemporaryDirectory() as directory, rename_in_errors(CONFIG, Path(directory)):
        manifest.write_json(Path(directory) / CONFIG, content)
        return architecture.read_config(Path(directory))


def _make_error(settings: RopeSettings, family: str, found: str) -> UsageError:
    return UsageError(
        f"{settings} cannot change the RoPE settings of a {family} model",
        found=found,
        expected=f"RoPE of one of the types {', '.join(_SETTINGS)}",
    )
