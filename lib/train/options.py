"""Declare the options of a run: its name, data, length, batch, resume, logs and end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.core import options
from lib.core.declared import Role, option
from lib.core.options import AUTO, auto_on_off, non_negative, on_off, positive, positive_int
from lib.optim import optimizers


def _auto_or_count(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else positive_int(text)


@dataclass(frozen=True)
class RunOptions:
    """The options that name a run, its data and its directories."""

    experiment_name: str = option(
        None,
        "-e",
        group="the run",
        role=Role.LOCAL,
        first="name of the run; files go to outputs/NAME",
        metavar="NAME",
        help="name of the run, a directory under --save-dir, or a path to its directory; "
        "not needed with --bench (required)",
    )
    dataset_name: list[str] = option(
        [],
        "-d",
        role=Role.LOCAL,
        first="dataset of stage 02; several make a mixture",
        metavar="DIR[=WEIGHT]",
        help="dataset of stage 02: a directory, or a name under hf_datasets/. Several make a "
        "mixture, each with its share of the samples: -d a=0.7 -d b=0.3. synthetic[:TOKENS]: "
        "random tokens, which need no dataset and no tokenizer; an epoch has TOKENS of them, by "
        "default 100M. With --bench, -d synthetic is the default (required)",
    )
    model_name: str | None = option(
        None,
        "-m",
        aliases=("hf_model", "model_name_or_path", "base_model"),
        role=Role.LOCAL,
        first="prepared model",
        metavar="NAME|DIR",
        help="model that stage 03 prepared, or any model directory; on resume, the default is the "
        "model of the run (default: the only one in --cache-dir)",
    )
    save_dir: Path = option(
        None,
        aliases=("checkpoint_dir", "output_dir"),
        role=Role.LOCAL,
        parse=Path,
        help="parent directory of the runs (default: outputs; if -e is a path, its parent)",
    )
    cache_dir: Path = option(
        Path(".cache"),
        role=Role.LOCAL,
        parse=Path,
        help="directory of prepared models and token stores",
    )
    seed: int = option(
        0,
        aliases=("training.seed", "debug.seed"),
        role=Role.RESULT,
        renumbers=True,
        parse=options.seed,
        help="seed of the order of samples, the initial weights and dropout",
    )


@dataclass(frozen=True)
class ResumeOptions:
    """The options of continuing a run."""

    resume: str = option(
        "auto",
        group="the run",
        role=Role.ALIKE,
        metavar="auto|never|copies|PATH",
        help="auto: resume from the newest valid checkpoint; never: fail if the run exists; "
        "copies: as auto, and take over a lost run of this name from --ckpt-copy-to; PATH: resume "
        "from this checkpoint",
    )
    resume_with_changes: bool = option(
        False,
        role=Role.ALIKE,
        help="resume even if data, batch size, seed or other options that affect the result have "
        "changed; needs --max-steps",
    )


@dataclass(frozen=True)
class LengthOptions:
    """The options of the length of a run and of its batches."""

    num_epochs: int | None = option(
        None,
        aliases=("num_train_epochs", "epochs"),
        group="length and batch",
        role=Role.LOCAL,
        parse=positive_int,
        first="passes over the data",
        help="passes over the data (default: 1, or until --max-steps)",
    )
    max_steps: int | None = option(
        None,
        aliases=("max_training_steps", "training.steps"),
        role=Role.LOCAL,
        parse=positive_int,
        first="maximum number of optimizer steps",
        help="maximum number of optimizer steps (default: no limit)",
    )
    steps_per_epoch: int | None = option(
        None,
        role=Role.LOCAL,
        parse=positive_int,
        help="optimizer steps that --num-epochs counts as one epoch, whatever the size of the data "
        "(default: one pass over the data)",
    )
    batch_size: int = option(
        None,
        "-b",
        aliases=(
            "per_device_train_batch_size",
            "micro_batch_size",
            "train_batch_size",
            "training.local_batch_size",
            "training.batch_size",
        ),
        role=Role.LOCAL,
        parse=_auto_or_count,
        first="micro-batch size",
        metavar="N|auto",
        help="samples per process in a micro-batch. auto: as many as fit in memory, at most "
        "32,768 tokens (2,048 on a CPU). With --global-batch-size, the default is 1 everywhere "
        "(default: auto, on a CPU 1)",
    )
    global_batch_size: int | None = option(
        None,
        aliases=("training.global_batch_size",),
        role=Role.RESULT,
        parse=positive_int,
        first="samples per step",
        help="samples per optimizer step over all ranks; replaces --grad-accum-steps, which "
        "otherwise multiplies the default (default: --batch-size × ranks)",
    )
    grad_accum_steps: int | None = option(
        None,
        aliases=("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        role=Role.LOCAL,
        parse=positive_int,
        help="micro-batches per optimizer step (default: 1)",
    )


@dataclass(frozen=True)
class CompileOptions:
    """The option of compiling the model, the loss and the optimizer's update."""

    compile: bool | None = option(
        None,
        group="speed and memory (no effect on the result, up to rounding)",
        role=Role.ALIKE,
        parse=auto_on_off,
        help="torch.compile the decoder blocks, the loss and the update of "
        f"{optimizers.list_compiled()}; the first step takes a minute longer. on: fail if the "
        "blocks cannot be compiled. auto: compile on GPUs, and warn about parts that cannot be "
        "compiled (default: auto)",
    )


@dataclass(frozen=True)
class BenchOptions:
    """The option of measuring instead of training."""

    bench: bool = option(
        False,
        group="measuring and planning",
        role=Role.ALIKE,
        help="measure 20 steps after 5 steps of warm-up, with random weights and by default on "
        "-d synthetic. Print tokens/s, MFU (on GPUs), memory, the time by phase and the share of "
        "communication, as a table and as one line of JSON on standard output. Save nothing",
    )


@dataclass(frozen=True)
class StopOptions:
    """The options of when a run or a hanging step ends."""

    max_minutes: float | None = option(
        None,
        group="logs, checkpoints and evaluation",
        role=Role.LOCAL,
        parse=positive,
        help="save and stop (exit code 75) after this many minutes; the same command resumes "
        "(default: no limit)",
    )
    watchdog_minutes: float = option(
        30.0,
        role=Role.LOCAL,
        parse=non_negative,
        help="minutes after which a step counts as hung: write the stacks of all threads to logs/ "
        "and end the process; 0: never",
    )


@dataclass(frozen=True)
class LogOptions:
    """The options of log lines."""

    log_freq: int = option(
        10,
        "--log-interval",
        aliases=("logging_steps", "logging_freq", "metrics.log_freq"),
        group="logs, checkpoints and evaluation",
        role=Role.ALIKE,
        parse=positive_int,
        help="steps between log lines",
    )
    log_style: str = option(
        "line",
        role=Role.LOCAL,
        choices=("line", "dict"),
        help="console format of a log step: an aligned line, or a Python dict with timers, as in "
        "the log file of each rank",
    )


@dataclass(frozen=True)
class RecordOptions:
    """The options of further records of a run."""

    wandb: bool = option(
        False,
        group="logs, checkpoints and evaluation",
        role=Role.LOCAL,
        parse=on_off,
        help="also log to Weights & Biases, offline, in the run's wandb/ directory (`wandb sync` "
        "uploads it)",
    )
    profile: tuple[int, int] | None = option(
        None,
        role=Role.LOCAL,
        parse=options.span,
        metavar="START:END",
        help="steps to profile. Each rank writes a trace and a table of operations to the run's "
        "profile/ directory, and on GPUs also a memory snapshot (default: none)",
    )
