"""Fill in the options of a run with `--bench`.

A bench trains a few steps with the usual training loop, and writes no files. The first steps are a
warm-up, since they compile and allocate. The next steps are measured as one window. The profiler,
which slows steps down, runs only after these, to measure the share of communication.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lib.checkpoints.vendor_tiers import VENDOR_OPTIONS
from lib.core import declared
from lib.tokens import synthetic
from lib.tokens.options import SYNTHETIC
from lib.train.config import DEFAULTS, Config

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
    "rollback_after",
    "log_freq",
    "log_style",
    "ckpt_freq",
    "ckpt_keep",
    "ckpt_keep_every",
    "ckpt_local_dir",
    *VENDOR_OPTIONS,
    "ckpt_local_freq",
    "ckpt_copy_to",
    "ckpt_copy_keep",
    "eval_freq",
    "eval_batches",
    "sample_prompts",
    "sample_tokens",
    "eval_suite",
    "suite_limit",
    "best_by",
    "wandb",
    "profile",
    "overwrite",
)


def configure_bench(config: Config) -> Config:
    """Return the options of a bench. The path of its experiment cannot exist."""
    defaults = {name: getattr(DEFAULTS, name) for name in _WITHOUT_EFFECT}
    data = config.dataset_name or [f"{SYNTHETIC}:{synthetic.DEFAULT_TOKENS}"]
    bench_values = {
        "experiment_name": NAME,
        "save_dir": Path(os.devnull),
        "dataset_name": data,
        "max_steps": STEPS,
        "rollback_after": STEPS + 1,
        "eval_freq": 0,
    }
    if config.makes_model:  # the model of a recipe need not be prepared
        bench_values["model_name"] = None
    return replace(config, **(defaults | bench_values))


def list_without_effect(config: Config) -> list[str]:
    """Return the typed options that have no effect on a bench."""
    names = (*_WITHOUT_EFFECT, *(["model_name"] if config.makes_model else []))
    return [
        declared.flag(name) for name in names if getattr(config, name) != getattr(DEFAULTS, name)
    ]
