"""Check the options against each other and against the length of a run.

Contradictory or impossible options are refused in one error; unusual ones are warned about.
"""

from __future__ import annotations

import math
import re
from functools import partial
from importlib import metadata
from pathlib import Path

from lib.checkpoints import commit
from lib.checkpoints.vendor_tiers import split_place
from lib.core import commands, declared, paths, units
from lib.core.errors import Problems, UsageError
from lib.core.options import AUTO
from lib.core.paths import Experiment
from lib.hub import folder
from lib.hub.repository import redact_urls
from lib.models import directory, lookup, scratch_sizes, tokenizer
from lib.optim.optimizers import OPTIMIZERS, find_option_problems
from lib.tokens import prompts
from lib.train import batch_division, plan
from lib.train.config import DEFAULTS, Config
from lib.train.mode import list_requested
from lib.train.output.kinds import choose_kind
from lib.train.sources.table import SOURCES, choose_source
from lib.train.trained import SCRATCH_LR, AllWeights, TrainedPart, choose_trained

_SHORTEST = 8  # tokens per sample
# For models with fewer parameters than the first number: the largest published learning rates,
# from scratch and in fine-tuning. docs/explanation/planning.md names the sources.
_PUBLISHED_LR = ((1e8, 3e-2, 3e-2), (1e9, 3e-3, 1e-3), (math.inf, 3e-3, 3e-4))
# The packages of requirements-optional.txt that options need, by field.
_PACKAGES = {"wandb": "wandb"}
# Options that have an effect only with another one, by that one, their owner.
_OWNED = {
    "streaming": ("online",),
}
_LONG_WARMUP = 0.5  # of the steps


def require_consistent(config: Config, has_begun: bool) -> None:
    """Raise one UsageError that lists all contradictions and all values that cannot train a model.

    has_begun: an earlier launch of this run has saved checkpoints.
    """
    problems = Problems()
    for check in (
        _check_model,
        choose_trained(config).check_options,
        _check_sources,
        _check_owners,
        _check_samples,
        _check_batch,
        _check_offload,
        _check_checkpoints,
        _check_packages,
    ):
        check(config, problems)
    if config.seq_length and config.seq_length < _SHORTEST:
        problems.add(
            f"--seq-length {config.seq_length} is too short to learn from: a token is "
            "predicted from those before it in its sample",
            expected=f"{_SHORTEST} tokens or more; 1024 is usual",
        )
    largest = OPTIMIZERS[config.optimizer].largest_lr
    if config.lr is not None and config.lr > largest and not has_begun:
        problems.add(
            f"--lr {config.lr:g} is too large for --optimizer {config.optimizer}",
            expected=f"1e-5 to 4e-3 as a rule, at most {largest:g} for a very small model",
        )
    problems.collect(lambda: require_falling(config))
    for problem in find_option_problems(config.optimizer, config):
        problems.add(problem)
    if steps := config.step_limit:
        problems.collect(lambda: require_enough_steps(config, steps, has_begun))
    problems.raise_if_any()


def _check_owners(config: Config, problems: Problems) -> None:
    """Add a problem for each option that has no effect, because its owner is not set."""
    for owner, names in _OWNED.items():
        if getattr(config, owner) != getattr(DEFAULTS, owner):
            continue
        for name in names:
            if getattr(config, name) != getattr(DEFAULTS, name):
                problems.add(f"{declared.flag(name)} belongs to {declared.flag(owner)}")


def require_falling(config: Config) -> None:
    """Raise UsageError if --min-lr is above the peak learning rate.

    While --lr is open, its largest default is taken.
    """
    largest = max(SCRATCH_LR, OPTIMIZERS[config.optimizer].small_lr)
    lr = largest if config.lr is None else config.lr
    if config.min_lr is not None and config.min_lr > lr:
        raise UsageError(f"--min-lr {config.min_lr:g} is above --lr {lr:g}")


def _check_model(config: Config, problems: Problems) -> None:
    if config.makes_model and config.model_name:
        problems.add(f"give -m {config.model_name} or {config.makes_model}, not both")
    trains_tokenizer = (
        config.makes_model and not config.tokenizer and choose_source(config).needs_tokenizer
    )
    if trains_tokenizer and (config.vocab_size or 1 << 30) < tokenizer.SMALLEST_VOCABULARY:
        problems.add(
            f"--vocab-size {config.vocab_size} is too small for a tokenizer: the bytes "
            f"and special tokens alone take {tokenizer.SMALLEST_VOCABULARY}"
        )
    for name in ("vocab_size", "tokenizer"):
        if getattr(config, name) and not config.makes_model:
            problems.add(
                f"--{name.replace('_', '-')} belongs to --model-size",
                expected=f"--model-size {'|'.join(scratch_sizes.SIZES)}",
            )


def require_model_shape(config: Config) -> None:
    """Raise UsageError if --from-scratch would silently use the shape of some prepared model."""
    prepared = [
        path for path in lookup.list_prepared(config.cache_dir) if not lookup.is_trial(path)
    ]
    if len(prepared) == 1 and directory.is_made_from_scratch(prepared[0]):
        return
    same_shape = f"; -m {prepared[0].name} for the shape of that model" if prepared else ""
    raise UsageError(
        "--from-scratch does not say which model is meant",
        expected=f"--model-size {'|'.join(scratch_sizes.SIZES)}, or -m NAME",
        hint=f"a small one to try{same_shape}:",
        run=commands.as_typed("--model-size", "tiny"),
    )


def _check_sources(config: Config, problems: Problems) -> None:
    sources = list_requested(SOURCES, config)
    for source in sources:
        source.check_options(config, problems)
    if others := [source.option for source in sources[1:] if source.option]:
        problems.add(
            f"{sources[0].option} and {units.join_names(others, 3)} each say where the samples "
            "come from",
            expected="one of them",
        )
    choose_kind(config).check_options(config, problems)


def _check_samples(config: Config, problems: Problems) -> None:
    if config.sample_prompts is not None:
        problems.collect(partial(prompts.read_prompts, config.sample_prompts))


def _check_batch(config: Config, problems: Problems) -> None:
    if config.global_batch_size and config.grad_accum_steps:
        problems.add("give --global-batch-size or --grad-accum-steps, not both")
    launched = [] if config.prepare_only else [plan.get_world_size()]
    for ranks in config.plan_gpus.counts if config.plan_gpus else launched:
        problems.collect(partial(batch_division.get_degrees(config).replicas, ranks))
    if config.plan_gpus and not config.dry_run:
        problems.add(
            "--plan-gpus only plans, and needs --dry-run", run=commands.as_typed("--dry-run")
        )


def _check_offload(config: Config, problems: Problems) -> None:
    kind = config.activation_checkpointing
    if config.activation_offload and kind not in (AUTO, "full"):
        problems.add(
            "--activation-offload on moves the inputs of blocks, and with "
            f"--activation-checkpointing {kind} a step keeps more than those",
            expected="--activation-checkpointing full, or auto, which then means full",
        )


def _check_checkpoints(config: Config, problems: Problems) -> None:
    if config.ckpt_local_dir == "":  # an unset variable
        problems.add("--ckpt-local-dir is empty", expected="a directory on each node's own disk")
    vendor, address = split_place(config.ckpt_local_dir or "")
    if vendor and not re.fullmatch(vendor.address, address):
        problems.add(
            f"--ckpt-local-dir {config.ckpt_local_dir} contains no address",
            expected=vendor.expected,
        )
    _check_copies(config, problems)
    if config.resume_with_changes and not config.step_limit:
        problems.add(
            "--resume-with-changes needs --max-steps: epochs of changed data or batches "
            "would count from the beginning of the run"
        )


def _check_copies(config: Config, problems: Problems) -> None:
    target = config.ckpt_copy_to
    if target is None:
        return
    if not target:
        problems.add(
            "--ckpt-copy-to is empty",
            expected="a directory, or s3://BUCKET/PREFIX; without the option nothing is copied",
        )
        return
    if "://" in target or target.startswith(("s3:", "/s3:")):
        if not folder.is_url(target):
            problems.add(
                f"--ckpt-copy-to {redact_urls(target)} names no bucket",
                expected="a directory, or s3://BUCKET/PREFIX without user and password",
            )
        return
    root = Experiment(config.save_dir, config.experiment_name).root
    if Path(target).resolve().is_relative_to(root.resolve()):
        problems.add(
            f"--ckpt-copy-to {target} lies in the directory of the run, {root}",
            expected="a directory on another disk",
        )


def _check_packages(config: Config, problems: Problems) -> None:
    """Add a problem for each missing package that an option needs, if this run will train."""
    if config.prepare_only or config.plan_gpus:
        return
    needed = {name: package for name, package in _PACKAGES.items() if getattr(config, name)}
    if package := folder.find_package(config.ckpt_copy_to or ""):
        needed["ckpt_copy_to"] = package
    if vendor := split_place(config.ckpt_local_dir or "")[0]:
        needed["ckpt_local_dir"] = vendor.package
    for name, package in needed.items():
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            problems.add(
                f"{declared.flag(name)} needs the package {package}, which is not installed",
                hint="a bundle of `airgap.py pack --optional` contains the wheels of all packages "
                "in requirements-optional.txt; or install it from a package index:",
                run=folder.install_command(package)
                if name == "ckpt_copy_to"
                else commands.pip_install_optional(package),
            )


def require_enough_steps(config: Config, steps: int, has_begun: bool) -> None:
    """Raise one UsageError that lists the options that do not fit into a run of `steps` steps.

    has_begun: an earlier launch has trained with this warm-up, so a long warm-up is allowed.
    """
    problems = Problems()
    length = units.counted(steps, "step")
    warmup = config.warmup_steps or 0
    falls = config.lr_scheduler != "constant"
    # With --steps-per-epoch, a later launch is expected to resume with more epochs.
    may_be_longer = has_begun or bool(config.steps_per_epoch)
    if not may_be_longer and (warmup > steps or (warmup == steps and falls)):
        problems.add(
            f"--warmup-steps {warmup:,} leaves nothing of a run of {length}: the learning "
            "rate would rise to the end and never fall",
            expected=f"at most {max(0, steps // 2):,} for that length, or a larger "
            f"{'--max-steps' if config.max_steps == steps else '--num-epochs'}",
        )
    if config.profile and config.profile[1] > steps:
        first, last = config.profile
        problems.add(
            f"--profile {first}:{last} goes past the end of a run of {length}: nothing "
            "would be recorded",
            expected=f"steps from 1 to {steps:,}, such as --profile "
            f"{max(1, min(steps, 12) - 2)}:{min(steps, 12)}",
        )
    problems.raise_if_any()


def describe_high_lr(
    lr: float, parameters: int, scratch: bool, trained: type[TrainedPart] = AllWeights
) -> str:
    """Return a warning about a learning rate that is too high for a model; "" if it is usual.

    parameters: number of parameters of the model. scratch: training starts from random weights.
    """
    usual = next(
        largest_scratch if scratch else largest_weights
        for limit, largest_scratch, largest_weights in _PUBLISHED_LR
        if parameters < limit
    )
    usual *= trained.lr_factor
    kind = "from scratch" if scratch else f"with {trained.lr_reason or 'weights'}"
    return (
        f"--lr {lr:g} is above {usual:g}, the most that is usual for a model of "
        f"{units.count(parameters)} parameters {kind}: the loss may rise "
        "(docs/explanation/planning.md)"
        if lr > usual
        else ""
    )


def describe_optimizer_risk(config: Config, scratch: bool) -> str:
    """Return a warning about an optimizer that trained weights may not suit; "" if there is none.

    scratch: training starts from random weights.
    """
    caution = OPTIMIZERS[config.optimizer].caution
    if not caution or scratch or choose_trained(config).freezes_base:
        return ""
    return f"--optimizer {config.optimizer}: {caution}"


def list_unusual_options(
    config: Config, steps: int, has_validation: bool, source: str
) -> list[str]:
    """Return a warning for each option that is unusual in a run of `steps` steps.

    source: the option that asks for the source of the samples, "" for prepared datasets.
    """
    warnings = _list_missing_mounts(config)
    length = units.counted(steps, "step")
    warmup = config.warmup_steps or 0
    if warmup > _LONG_WARMUP * steps:
        warnings.append(
            f"--warmup-steps {warmup:,} takes {min(100, 100 * warmup // steps)} % of the "
            f"run of {length}; 1 to 10 % is usual"
        )
    if config.lr_scheduler == "constant" and not math.isclose(config.min_lr, config.lr / 10):
        warnings.append(f"--min-lr {config.min_lr:g} does nothing with --lr-scheduler constant")
    if steps < config.ckpt_freq != DEFAULTS.ckpt_freq:
        warnings.append(
            f"--ckpt-freq {config.ckpt_freq:,} is more than the run of {length}: only its "
            "last step is saved, and an earlier failure loses all"
        )
    if config.ckpt_keep == 1:
        warnings.append(
            f"--ckpt-keep 1 keeps {commit.MIN_KEPT} checkpoints, since the newest may turn out to "
            "be damaged"
        )
    if steps < config.log_freq != DEFAULTS.log_freq:
        warnings.append(
            f"--log-freq {config.log_freq:,} is more than the run of {length}: only its "
            "first and its last step are logged"
        )
    typed = [
        f"--{name.replace('_', '-')}"
        for name in ("eval_freq", "eval_batches")
        if getattr(config, name) not in (getattr(DEFAULTS, name), 0)
    ]
    if typed and not has_validation:
        warnings.append(
            f"{' and '.join(typed)} {'have' if typed[1:] else 'has'} nothing to measure: "
            "no dataset has a validation split that fills a sample (stage 02 makes one "
            "with --validation-percent)"
            if not source
            else f"{' and '.join(typed)} do nothing with {source}, which has no validation"
        )
    elif steps < config.eval_freq != DEFAULTS.eval_freq:
        warnings.append(
            f"--eval-freq {config.eval_freq:,} is more than the run of {length}: the "
            "validation loss is measured once, at its end"
        )
    return warnings


def _list_missing_mounts(config: Config) -> list[str]:
    """Return a warning for each directory whose disk is not mounted."""
    vendor, local = split_place(config.ckpt_local_dir or "")
    directories = {
        "--save-dir": config.save_dir,
        "--ckpt-local-dir": Path(local) if local and not vendor else None,
    }
    return [
        f"{name} {directory} is on the wrong disk: {mount}, which /etc/fstab lists, is not mounted"
        for name, directory in directories.items()
        if directory and (mount := paths.find_missing_mount(directory))
    ]
