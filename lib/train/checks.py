"""Options against the length of a run: what cannot come about is refused, what is odd is told."""

from __future__ import annotations

import math

from lib.core import units
from lib.core.errors import Problems
from lib.core.options import Options
from lib.train.arguments import CKPT_FREQ, EVAL_BATCHES, EVAL_FREQ, LOG_FREQ

_SHORTEST = 8  # tokens
# AdamW moves every weight by up to the learning rate in each step, and weights are far below 1.
_LARGEST_LR = 0.1
# Parameters below which, and the largest learning rates that are published for such a model:
# from scratch, and of one that has weights. docs/planning.md names the sources.
_PUBLISHED_LR = ((1e8, 3e-2, 3e-2), (1e9, 3e-3, 1e-3), (math.inf, 3e-3, 3e-4))
_LONG_WARMUP = 0.5  # of the steps


def require_sane(opts: Options, has_begun: bool) -> None:
    """Raise one UsageError that tells all values that train nothing of use; before any long work.
    """
    problems = Problems()
    if opts.seq_length and opts.seq_length < _SHORTEST:
        problems.add(f"--seq-length {opts.seq_length} is too short to learn from: a token is "
                     "predicted from those before it in its sample",
                     expected=f"{_SHORTEST} tokens or more; 1024 is usual")
    if opts.lr is not None and opts.lr > _LARGEST_LR and not has_begun:
        problems.add(f"--lr {opts.lr:g} is too large: AdamW moves every weight by up to that much "
                     "in each step", expected="1e-5 to 3e-3 as a rule, at most "
                                              f"{_LARGEST_LR:g} for a very small model")
    if opts.max_steps:
        problems.collect(lambda: require_room(opts, opts.max_steps, has_begun))
    problems.raise_if_any()


def require_room(opts: Options, steps: int, has_begun: bool) -> None:
    """Raise one UsageError that tells all that does not fit into a run of so many steps.

    has_begun: an earlier launch has trained with this warm-up, so that it can only be told.
    """
    problems, length = Problems(), units.counted(steps, "step")
    warmup = opts.warmup_steps or 0
    if not has_begun and (warmup > steps or (warmup == steps and opts.lr_scheduler != "constant")):
        problems.add(f"--warmup-steps {warmup:,} leaves nothing of a run of {length}: the learning "
                     "rate would rise to the end and never fall",
                     expected=f"at most {max(0, steps // 2):,} for that length, or a larger "
                              "--max-steps or --num-epochs")
    if opts.profile and opts.profile[1] > steps:
        first, last = opts.profile
        problems.add(f"--profile {first}:{last} goes past the end of a run of {length}: nothing "
                     "would be recorded",
                     expected=f"steps from 1 to {steps:,}, such as --profile "
                              f"{max(1, min(steps, 12) - 2)}:{min(steps, 12)}")
    problems.raise_if_any()


def rate_doubt(lr: float, parameters: int, scratch: bool) -> str:
    """Return what is odd about a learning rate for a model of that size, "" when nothing is."""
    usual = next(of_scratch if scratch else of_weights
                 for below, of_scratch, of_weights in _PUBLISHED_LR if parameters < below)
    kind = "from scratch" if scratch else "that has weights"
    return f"--lr {lr:g} is above {usual:g}, the most that is usual for a model of " \
           f"{units.count(parameters)} parameters {kind}: the loss may rise (docs/planning.md)" \
        if lr > usual else ""


def doubts(opts: Options, steps: int, has_validation: bool) -> list[str]:
    """Return what is odd about the options for a run of so many steps, a sentence each."""
    found, length = [], units.counted(steps, "step")
    warmup = opts.warmup_steps or 0
    if warmup > _LONG_WARMUP * steps:
        found.append(f"--warmup-steps {warmup:,} takes {min(100, 100 * warmup // steps)} % of the "
                     f"run of {length}; 1 to 10 % is usual")
    if opts.lr_scheduler == "constant" and not math.isclose(opts.min_lr, opts.lr / 10):
        found.append(f"--min-lr {opts.min_lr:g} does nothing with --lr-scheduler constant")
    if steps < opts.ckpt_freq != CKPT_FREQ:
        found.append(f"--ckpt-freq {opts.ckpt_freq:,} is more than the run of {length}: only its "
                     "last step is saved, and a failure before loses all")
    if (keep := opts.ckpt_keep_every) and keep % opts.ckpt_freq:
        found.append(f"--ckpt-keep-every {keep:,} is no multiple of --ckpt-freq {opts.ckpt_freq:,}:"
                     f" kept are the multiples of {math.lcm(keep, opts.ckpt_freq):,}")
    if steps < opts.log_freq != LOG_FREQ:
        found.append(f"--log-freq {opts.log_freq:,} is more than the run of {length}: only its "
                     "first and its last step are logged")
    typed = [f"--{name}" for name, value, default in (
        ("eval-freq", opts.eval_freq, EVAL_FREQ), ("eval-batches", opts.eval_batches, EVAL_BATCHES))
        if value not in (default, 0)]
    if typed and not has_validation:
        found.append(f"{' and '.join(typed)} {'have' if typed[1:] else 'has'} nothing to measure: "
                     "no dataset has a validation split that fills a sample (stage 02 makes one "
                     "with --validation-percent)" if not opts.streaming else
                     f"{' and '.join(typed)} do nothing with --streaming, which has no validation")
    elif steps < opts.eval_freq != EVAL_FREQ:
        found.append(f"--eval-freq {opts.eval_freq:,} is more than the run of {length}: the "
                     "validation loss is measured once, at its end")
    return found
