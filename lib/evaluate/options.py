"""Declare the options of evaluations while training, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.core.declared import Role, option
from lib.core.options import count, positive_int
from lib.runs import figures


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of evaluations while training."""

    eval_freq: int = option(
        500,
        aliases=("eval_steps", "validation_freq", "validation.freq"),
        group="logs, checkpoints and evaluation",
        role=Role.ALIKE,
        parse=count,
        help="steps between evaluations; 0: evaluate only at the end",
    )
    eval_batches: int = option(
        100,
        aliases=("validation_batches", "validation.steps"),
        role=Role.ALIKE,
        parse=positive_int,
        help="global batches of the validation split per evaluation",
    )
    sample_prompts: Path | None = option(
        None,
        role=Role.LOCAL,
        parse=Path,
        metavar="FILE",
        help="continue prompts while training, and write the samples to samples.jsonl: a text file "
        'with a prompt per line, or JSON Lines with "prompt" or "messages" (default: no samples)',
    )
    eval_suite: str = option(
        "",
        role=Role.ALIKE,
        metavar="DIR|NAME[:N]",
        help="evaluate the model on these tasks: a directory, or small, six tasks that come with "
        "the code; :N takes only the first N items of each (default: none)",
    )
    best_by: str = option(
        figures.DEFAULT_SCORE,
        role=Role.ALIKE,
        parse=figures.parse_score,
        metavar="KEY",
        help="key of metrics.jsonl that decides which checkpoint is the best: the lowest value is "
        "best for a loss, a perplexity or bits_per_byte, the highest for an accuracy "
        "(eval/TASK/accuracy)",
    )
