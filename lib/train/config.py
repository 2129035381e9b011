"""Combine the options that the rooms declare to `Config`, the options of stage 04."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.checkpoints.options import CheckpointOptions
from lib.core import declared, options
from lib.core.declared import Role, option
from lib.core.options import AUTO
from lib.evaluate.options import EvaluationOptions
from lib.models.options import LoraOptions, ModelOptions
from lib.optim.options import GuardOptions, OptimizerOptions
from lib.parallel.options import DeviceOptions, ParallelOptions, PrecisionOptions
from lib.planning.options import PlanOptions
from lib.tokens.options import ChatOptions, DataOptions, SampleOptions
from lib.train.options import (
    BenchOptions,
    CompileOptions,
    LengthOptions,
    LogOptions,
    RecordOptions,
    ResumeOptions,
    RunOptions,
    StopOptions,
)

EARLIER_LAUNCH = "earlier launch"  # in settled_by: the run was started with this value


# --help shows the options from the last class to the first: so dataclasses order their fields.
@dataclass(frozen=True)
class Config(
    RecordOptions,
    StopOptions,
    EvaluationOptions,
    CheckpointOptions,
    LogOptions,
    PlanOptions,
    BenchOptions,
    ParallelOptions,
    CompileOptions,
    DeviceOptions,
    PrecisionOptions,
    GuardOptions,
    OptimizerOptions,
    SampleOptions,
    LengthOptions,
    LoraOptions,
    ResumeOptions,
    ChatOptions,
    DataOptions,
    ModelOptions,
    RunOptions,
):
    """Contains the options of a run.

    An option is open while its value is None or AUTO; lib/train/settle.py gives it a value.
    settled_by: the reason for each value that was chosen in this way, by field. keep_gathered: the
    memory suffices to keep weights gathered throughout a step.
    """

    # Every stage has these options.
    config: Path | None = option(None, role=Role.LOCAL)
    dry_run: bool = option(False, role=Role.LOCAL, first="print the plan and write nothing")
    overwrite: bool = option(False, role=Role.ALIKE)
    num_workers: int = option(1, role=Role.LOCAL)
    no_progress: bool = option(False, role=Role.LOCAL)
    settled_by: Mapping[str, str] = field(default_factory=dict)
    keep_gathered: bool = False

    def with_values(self, settled_by: str, **values: Any) -> Config:
        """Return a copy with other values of options. settled_by: the reason for the values."""
        return replace(
            self, **values, settled_by={**self.settled_by, **dict.fromkeys(values, settled_by)}
        )

    def without_value(self, name: str) -> Config:
        """Return a copy in which a settled option is None again."""
        others = {key: reason for key, reason in self.settled_by.items() if key != name}
        changes: dict[str, Any] = {name: None, "settled_by": others}
        return replace(self, **changes)

    @property
    def has_auto_batch(self) -> bool:
        """Return whether --batch-size is `auto`, or was before it was settled."""
        return self.batch_size == AUTO or "batch_size" in self.settled_by

    @property
    def makes_model(self) -> str:
        """Return the option that creates a model from scratch, with its value; "" for none."""
        return f"--model-size {self.model_size}" if self.model_size else ""

    @property
    def step_limit(self) -> int | None:
        """Return the most steps that the options allow; None if only the data ends the run."""
        if not self.steps_per_epoch or (self.max_steps and not self.num_epochs):
            return self.max_steps
        steps = self.steps_per_epoch * (self.num_epochs or 1)
        return min(steps, self.max_steps or steps)

    def values_of(self, *roles: Role) -> dict[str, Any]:
        """Return the values of the options with one of these roles, by field."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in declared.list_fields(Config)
            if entry.metadata["role"] in roles
        }

    def to_record(self) -> dict[str, Any]:
        """Return all options as plain values for config.yaml.

        Options that the model, the hardware or the memory estimate decided get their defaults, so
        that `--config` with this record decides them anew on another machine.
        """
        reopened = {
            name: default
            for name, default in (
                ("seq_length", None),
                ("precision", None),
                ("activation_checkpointing", AUTO),
                ("shard_size", None),
                ("context_parallel_method", AUTO),
                ("router_aux_loss", AUTO),
            )
            if name in self.settled_by
        }
        return options.to_plain_values(options.Options(**self.values_of(*Role) | reopened))

    def identity(self, inputs: Mapping[str, Any], global_batch: int) -> dict[str, Any]:
        """Return the options and inputs that affect a run's result, for lib/core/identity.py.

        inputs: fingerprints of model, dataset and tokenizer. global_batch: samples per step.
        """
        quiet_defaults = {
            entry.name
            for entry in declared.list_fields(Config)
            if (quiet := entry.metadata["quiet"])
            and getattr(self, entry.name)
            in (quiet if isinstance(quiet, tuple) else (entry.default,))
        }
        values = {
            name: value
            for name, value in self.values_of(Role.RESULT).items()
            if name not in quiet_defaults
        }
        return {"options": {**values, "global_batch_size": global_batch}, "inputs": dict(inputs)}


DEFAULTS = Config()


def list_changed_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options that have other values, as plain values.

    config.yaml records them, so that other programs can show the options of a run without knowing
    those of its version.
    """
    defaults = options.to_plain_values(DEFAULTS)
    changed = (name for name, value in values.items() if value != defaults.get(name))
    return {name: defaults.get(name) for name in changed}
