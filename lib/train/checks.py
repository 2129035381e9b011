"""Options against each other and against the length of a run.

What contradicts itself or cannot come about is refused, all of it at once; what is odd is told.
"""

from __future__ import annotations

import math
import re
from functools import partial
from importlib import metadata

from lib.core import commands, declared, patterns, units
from lib.core.errors import Problems, UsageError
from lib.models import directory, lookup, peft_adapter, scratch, tokenizer
from lib.optim.registry import OPTIMIZERS, find_option_problems
from lib.train import plan
from lib.train.config import DEFAULTS, Config

_SHORTEST = 8  # tokens
# Parameters below which, and the largest learning rates that are published for such a model:
# from scratch, and of one that has weights. docs/explanation/planning.md names the sources.
_PUBLISHED_LR = ((1e8, 3e-2, 3e-2), (1e9, 3e-3, 1e-3), (math.inf, 3e-3, 3e-4))
# By field, the package of requirements-optional.txt that an option wants.
_PACKAGES = {"wandb": "wandb", "ckpt_hyperpod": "amzn-sagemaker-checkpointing"}
_LARGEST_RANK = 65_536
_LONG_WARMUP = 0.5  # of the steps
LORA_LR = 10  # times the default: "LoRA without regret" (Schulman et al. 2025)
DEFAULT_LRS = {True: 3e-4, False: 3e-5}  # from scratch, and of a model that has weights


def require_sound(config: Config, has_begun: bool) -> None:
    """Raise one UsageError that tells all contradictions and all values that train nothing of use.

    has_begun: an earlier launch of this run has left checkpoints.
    """
    problems = Problems()
    for check in (_model, _adapters, _streaming, _batch, _checkpoints, _packages):
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
            expected=f"1e-5 to 3e-3 as a rule, at most {largest:g} for a very small model",
        )
    default = max(DEFAULT_LRS.values())  # at most
    problems.collect(lambda: require_falling(config, default if config.lr is None else config.lr))
    for problem in find_option_problems(config.optimizer, config):
        problems.add(problem)
    if steps := config.step_limit:
        problems.collect(lambda: require_room(config, steps, has_begun))
    problems.raise_if_any()


def require_falling(config: Config, lr: float) -> None:
    """Raise UsageError when the learning rate would rise to its minimum."""
    if config.min_lr is not None and config.min_lr > lr:
        raise UsageError(f"--min-lr {config.min_lr:g} is above --lr {lr:g}")


def _model(config: Config, problems: Problems) -> None:
    if config.model_size and not config.from_scratch:
        problems.add(
            "--model-size makes a model without weights", run=commands.as_typed("--from-scratch")
        )
    if config.model_size and config.model_name:
        problems.add(f"give -m {config.model_name} or --model-size {config.model_size}, not both")
    if (
        config.model_size
        and not config.tokenizer
        and (config.vocab_size or 1 << 30) < tokenizer.SMALLEST_VOCABULARY
    ):
        problems.add(
            f"--vocab-size {config.vocab_size} is too small for a tokenizer: the bytes "
            f"and special tokens alone take {tokenizer.SMALLEST_VOCABULARY}"
        )
    for name in ("vocab_size", "tokenizer"):
        if getattr(config, name) and not config.model_size:
            problems.add(
                f"--{name.replace('_', '-')} belongs to --model-size",
                expected=f"--from-scratch --model-size {'|'.join(scratch.SIZES)}",
            )


def require_model_shape(config: Config) -> None:
    """Raise UsageError if a model from scratch would silently get the shape of a prepared one."""
    several = [path for path in lookup.list_prepared(config.cache_dir) if not lookup.is_trial(path)]
    if len(several) == 1 and directory.is_made_from_scratch(several[0]):
        return
    like = f"; -m {several[0].name} for the shape of that model" if several else ""
    raise UsageError(
        "--from-scratch does not say which model is meant",
        expected=f"--model-size {'|'.join(scratch.SIZES)}, or -m NAME",
        hint=f"a small one to try{like}:",
        run=commands.as_typed("--model-size", "tiny"),
    )


def _adapters(config: Config, problems: Problems) -> None:
    for name in ("lora_alpha", "lora_dropout", "lora_targets", "lora_rslora"):
        if not config.trains_lora and getattr(config, name) != getattr(DEFAULTS, name):
            problems.add(
                f"{declared.flag(name)} belongs to --lora-rank",
                expected="the rank of the adapters: 8 to 256 as a rule",
            )
    if config.lora_alpha is not None and (odd := peft_adapter.find_odd_alpha(config.lora_alpha)):
        problems.add(f"--lora-alpha {config.lora_alpha:g} is no use", expected=odd)
    if config.lora_dropout >= 1:
        problems.add(f"--lora-dropout must be below 1, got {config.lora_dropout:g}")
    if config.lora_rank > _LARGEST_RANK:
        problems.add(
            f"--lora-rank {config.lora_rank} is more than any linear has rows or columns",
            expected="8 to 256 as a rule",
        )
    if config.trains_lora and config.precision == "fp8":
        problems.add(
            "--precision fp8 has no adapters: what is frozen would be cast anew in each pass",
            run=commands.as_typed("--precision", "bf16"),
        )
    if config.lora_from is None and (problem := patterns.find_problem(config.lora_targets)):
        problems.add(
            f"--lora-targets {config.lora_targets!r} is no regular expression that can be used",
            found=problem,
            expected="'q_proj|v_proj', say",
        )


def _streaming(config: Config, problems: Problems) -> None:
    if not config.streaming:
        for name in ("online", "include", "text_field"):
            if getattr(config, name):
                problems.add(f"--{name.replace('_', '-')} belongs to --streaming")
        return
    if not config.step_limit:
        problems.add("--streaming needs --max-steps: how many samples there are is not known")
    if config.num_epochs and not config.steps_per_epoch:
        problems.add("--streaming ends at --max-steps, not after --num-epochs")
    if config.packing == "documents":
        problems.add("--streaming has no --packing documents: packs need all documents at hand")
    if len(config.dataset_name) > 1:
        problems.add(
            "--streaming takes one dataset, no mixture", found=", ".join(config.dataset_name)
        )
    if config.prepare_only:
        problems.add("--prepare-only makes the token store, which --streaming does without")
    if config.resume_with_changes:
        problems.add("--streaming has no --resume-with-changes: a cursor means nothing elsewhere")
    if config.include and not config.online:
        problems.add("--include chooses files of a dataset on the Hub, with --online")


def _batch(config: Config, problems: Problems) -> None:
    if config.global_batch_size and config.grad_accum_steps:
        problems.add("give --global-batch-size or --grad-accum-steps, not both")
    here = [] if config.prepare_only else [plan.launched_size()]  # which a run may have elsewhere
    for ranks in config.plan_gpus or here:
        problems.collect(partial(plan.degrees(config).replicas, ranks))
    if config.keep_gathered and config.cpu_offload:
        problems.add(
            "--keep-gathered on keeps weights on the GPU, and --cpu-offload on takes them off it",
            expected="one of them",
        )
    if config.plan_gpus and not config.dry_run:
        problems.add("--plan-gpus plans and does not train", run=commands.as_typed("--dry-run"))


def _checkpoints(config: Config, problems: Problems) -> None:
    if config.ckpt_local_freq and not (config.ckpt_local_dir or config.ckpt_hyperpod):
        problems.add("--ckpt-local-freq belongs to --ckpt-local-dir or --ckpt-hyperpod")
    if (config.ckpt_local_freq or 0) >= config.ckpt_freq:
        problems.add(
            f"--ckpt-local-freq {config.ckpt_local_freq} is not below --ckpt-freq "
            f"{config.ckpt_freq}",
            expected="local checkpoints are the frequent ones",
        )
    if config.ckpt_local_dir and config.ckpt_hyperpod:
        problems.add("give --ckpt-local-dir or --ckpt-hyperpod, not both")
    if not re.fullmatch(r"auto|https?://[^/@\s]+/?", config.ckpt_hyperpod or "auto"):
        problems.add(
            f"--ckpt-hyperpod {config.ckpt_hyperpod} is not an address",
            expected="auto, or one like http://host:9200",
        )
    if config.resume_with_changes and not config.step_limit:
        problems.add(
            "--resume-with-changes needs --max-steps: epochs of changed data or batches "
            "would count from the beginning of the run"
        )


def _packages(config: Config, problems: Problems) -> None:
    """Note the packages that options want and this machine lacks, unless it will not train."""
    if config.prepare_only or config.plan_gpus:
        return
    for name, package in _PACKAGES.items():
        try:
            if getattr(config, name):
                metadata.version(package)
        except metadata.PackageNotFoundError:
            problems.add(
                f"{declared.flag(name)} needs the package {package}, which is not installed",
                hint="a bundle that `airgap.py pack --optional` made has its "
                "wheels; or with an index in reach:",
                run=commands.pip_install_optional(package),
            )


def require_room(config: Config, steps: int, has_begun: bool) -> None:
    """Raise one UsageError that tells all that does not fit into a run of so many steps.

    has_begun: an earlier launch has trained with this warm-up, so that it can only be told.
    """
    problems = Problems()
    length = units.counted(steps, "step")
    warmup = config.warmup_steps or 0
    falls = config.lr_scheduler != "constant"
    # An epoch of N steps is the trainer's own: further launches go on, with more epochs.
    may_go_on = has_begun or bool(config.steps_per_epoch)
    if not may_go_on and (warmup > steps or (warmup == steps and falls)):
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


def rate_doubt(lr: float, parameters: int, scratch: bool, adapted: bool = False) -> str:
    """Return what is odd about a learning rate for a model of that size, "" when nothing is.

    adapted: only adapters are trained.
    """
    usual = next(
        of_scratch if scratch else of_weights
        for below, of_scratch, of_weights in _PUBLISHED_LR
        if parameters < below
    )
    usual *= LORA_LR if adapted else 1
    kind = "that has adapters" if adapted else "that has weights"
    kind = "from scratch" if scratch else kind
    return (
        f"--lr {lr:g} is above {usual:g}, the most that is usual for a model of "
        f"{units.count(parameters)} parameters {kind}: the loss may rise "
        "(docs/explanation/planning.md)"
        if lr > usual
        else ""
    )


def doubts(config: Config, steps: int, has_validation: bool) -> list[str]:
    """Return what is odd about the options for a run of so many steps, a sentence each."""
    found = []
    length = units.counted(steps, "step")
    warmup = config.warmup_steps or 0
    if warmup > _LONG_WARMUP * steps:
        found.append(
            f"--warmup-steps {warmup:,} takes {min(100, 100 * warmup // steps)} % of the "
            f"run of {length}; 1 to 10 % is usual"
        )
    if config.lr_scheduler == "constant" and not math.isclose(config.min_lr, config.lr / 10):
        found.append(f"--min-lr {config.min_lr:g} does nothing with --lr-scheduler constant")
    if steps < config.ckpt_freq != DEFAULTS.ckpt_freq:
        found.append(
            f"--ckpt-freq {config.ckpt_freq:,} is more than the run of {length}: only its "
            "last step is saved, and a failure before loses all"
        )
    if (keep := config.ckpt_keep_every) and keep % config.ckpt_freq:
        found.append(
            f"--ckpt-keep-every {keep:,} is no multiple of --ckpt-freq "
            f"{config.ckpt_freq:,}: kept are the multiples of "
            f"{math.lcm(keep, config.ckpt_freq):,}"
        )
    if steps < config.log_freq != DEFAULTS.log_freq:
        found.append(
            f"--log-freq {config.log_freq:,} is more than the run of {length}: only its "
            "first and its last step are logged"
        )
    typed = [
        f"--{name.replace('_', '-')}"
        for name in ("eval_freq", "eval_batches")
        if getattr(config, name) not in (getattr(DEFAULTS, name), 0)
    ]
    if typed and not has_validation:
        found.append(
            f"{' and '.join(typed)} {'have' if typed[1:] else 'has'} nothing to measure: "
            "no dataset has a validation split that fills a sample (stage 02 makes one "
            "with --validation-percent)"
            if not config.streaming
            else f"{' and '.join(typed)} do nothing with --streaming, which has no validation"
        )
    elif steps < config.eval_freq != DEFAULTS.eval_freq:
        found.append(
            f"--eval-freq {config.eval_freq:,} is more than the run of {length}: the "
            "validation loss is measured once, at its end"
        )
    return found
