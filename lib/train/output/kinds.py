"""Choose what a launch leaves behind, from its options alone: a run, or the figures of a bench.

Launchers and the checks of options ask this module. `lib/train/output/table.py` names the class
that writes each kind. To add a kind, write both, and name them in KINDS and OUTPUTS.

A bench trains a few steps with the usual training loop. The first steps are a warm-up, since they
compile and allocate. The next steps are measured as one window. The profiler, which slows steps
down, runs only after these, to measure the share of communication.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from lib.core import declared, log
from lib.core.errors import Problems
from lib.tokens.options import DEFAULT_TOKENS, SYNTHETIC
from lib.train.config import DEFAULTS, Config
from lib.train.mode import Mode, list_requested

WARMUP_STEPS = 5
MEASURED_STEPS = 20
_PROFILED_STEPS = 3
LAST_MEASURED = WARMUP_STEPS + MEASURED_STEPS
STEPS = LAST_MEASURED + _PROFILED_STEPS
NAME = "bench"  # in place of an experiment's name
# Options about the length of a run, its checkpoints and its logs.
_WITHOUT_EFFECT = (
    "experiment_name",
    "resume",
    "resume_with_changes",
    "num_epochs",
    "max_steps",
    "steps_per_epoch",
    "warmup_steps",
    "log_freq",
    "log_style",
    "ckpt_freq",
    "ckpt_keep",
    "ckpt_local_dir",
    "ckpt_copy_to",
    "eval_freq",
    "eval_batches",
    "sample_prompts",
    "eval_suite",
    "best_by",
    "wandb",
    "profile",
    "overwrite",
)


class OutputKind(Mode):
    """What a launch leaves behind.

    keeps_files: the launch writes to the directory of an experiment. reads_weights: the weights of
    the model matter, so a model without them is an error.
    """

    keeps_files: ClassVar[bool]
    reads_weights: ClassVar[bool]

    @classmethod
    @abstractmethod
    def fill_options(cls, config: Config) -> Config:
        """Return the options with the values that this kind prescribes."""

    @classmethod
    @abstractmethod
    def begin_log(cls, config: Config) -> None:
        """Prepare standard output and the log. config: the options before `fill_options`."""


class RunKind(OutputKind):
    """The directory of an experiment, from which the same command resumes."""

    keeps_files = True
    reads_weights = True

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return True: this is what a launch writes if nothing else is asked for."""
        return True

    @classmethod
    def fill_options(cls, config: Config) -> Config:
        """Return the options as they are."""
        return config

    @classmethod
    def begin_log(cls, config: Config) -> None:
        """Do nothing: the log is on standard output already."""

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Do nothing: all options may be combined with a run."""


class BenchKind(OutputKind):
    """A table and a line of JSON on standard output, and nothing else."""

    keeps_files = False
    reads_weights = False

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return whether --bench is given."""
        return config.bench

    @classmethod
    def fill_options(cls, config: Config) -> Config:
        """Return the options of a bench. The path of its experiment cannot exist."""
        defaults = {name: getattr(DEFAULTS, name) for name in _WITHOUT_EFFECT}
        bench_values = {
            "experiment_name": NAME,
            "save_dir": Path(os.devnull),
            "dataset_name": config.dataset_name or [f"{SYNTHETIC}:{DEFAULT_TOKENS}"],
            "max_steps": STEPS,
            "eval_freq": 0,
        }
        if config.makes_model:  # the model of a recipe need not be prepared
            bench_values["model_name"] = None
        return replace(config, **(defaults | bench_values))

    @classmethod
    def begin_log(cls, config: Config) -> None:
        """Keep standard output for the result, and log which options have no effect."""
        log.setup(sys.stderr)
        if ignored := list_without_effect(config):
            log.info(f"without effect on --bench: {', '.join(ignored)}")

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for --prepare-only, which would not measure."""
        if config.prepare_only:
            problems.add("--bench trains, and --prepare-only ends before training")


def list_without_effect(config: Config) -> list[str]:
    """Return the typed options that have no effect on a bench."""
    names = (*_WITHOUT_EFFECT, *(["model_name"] if config.makes_model else []))
    return [
        declared.flag(name) for name in names if getattr(config, name) != getattr(DEFAULTS, name)
    ]


KINDS: tuple[type[OutputKind], ...] = (BenchKind, RunKind)


def choose_kind(config: Config) -> type[OutputKind]:
    """Return the first kind that the options ask for."""
    return list_requested(KINDS, config)[0]
