"""Evaluate the model of a run on a suite of tasks (--eval-suite), sharded as it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, units
from lib.core.errors import UsageError
from lib.evaluate import tasks as task_files
from lib.evaluate.tasks import Task
from lib.tokens.build import require_vocabulary
from lib.tokens.encode import Encoder
from lib.train.config import DEFAULTS, Config
from lib.train.source import SampleSource

if TYPE_CHECKING:  # imports torch, which bad tasks are reported before
    from transformers import PreTrainedModel

    from lib.evaluate.passes import EncodedSuite
    from lib.evaluate.results import TaskResult
    from lib.parallel.layout import ParallelLayout
    from lib.train.plan import Plan

_SHOWN = 6  # tasks in a line of the log


def read_tasks(config: Config, source: SampleSource) -> list[Task]:
    """Return the tasks of --eval-suite, [] without it.

    source: that of the run. Raises UsageError or ArtifactError with all problems of the suite, or
    if a task has the name of a part of the validation split.
    """
    _warn_about_best(config)
    if not config.eval_suite:
        return []
    name, limit = _split_limit(config.eval_suite)
    directory = task_files.find_suite(name, config.cache_dir)
    tasks = task_files.read_suite(directory, limit)
    _require_key(config, directory, tasks)
    _require_distinct_names(tasks, source.name_validation_texts())
    log.detail(
        f"suite: {directory}, {units.counted(len(tasks), 'task')}, "
        f"{units.counted(task_files.count_requests(tasks), 'text')} to score"
    )
    return tasks


def _split_limit(suite: str) -> tuple[str, int | None]:
    """Return the name of a suite, and the number of items behind it, None for all."""
    name, colon, count = suite.rpartition(":")
    if Path(suite).is_dir():
        return suite, None
    return (name, int(count)) if colon and count.isdecimal() and int(count) else (suite, None)


def _require_key(config: Config, directory: Path, tasks: Iterable[Task]) -> None:
    """Raise UsageError if --best-by names another metric of a task than those that it has."""
    name = config.best_by.split("/")[1]
    keys = next((task.keys() for task in tasks if task.name == name), [config.best_by])
    if config.best_by not in keys:
        raise UsageError(
            f"--best-by {config.best_by} is no figure of {directory}",
            expected=", ".join(keys),
        )


def _require_distinct_names(tasks: Iterable[Task], parts: set[str]) -> None:
    """Raise UsageError if `eval/NAME/…` could mean both a task and a part of the validation."""
    if common := sorted(parts & {task.name for task in tasks}):
        raise UsageError(
            f"{units.join_names(common, 8)}: name of a task of --eval-suite and of a source or "
            "dataset of the validation split",
            expected="different names, since both name figures eval/NAME/…",
            hint="rename the file of the task",
        )


def _warn_about_best(config: Config) -> None:
    """Warn if --best-by is measured at steps that have no checkpoint."""
    every = config.eval_freq
    if config.best_by == DEFAULTS.best_by or log.rank() != 0:
        return
    if not every:
        log.warn(
            f"only the checkpoint of the last step can be the best by {config.best_by}, which is "
            "not measured before (--eval-freq is the number of steps between measurements)"
        )
    elif every % config.ckpt_freq:
        common = math.lcm(every, config.ckpt_freq)
        log.warn(
            f"only checkpoints of every {common:,} steps and of the last step can be the best by "
            f"{config.best_by}: it is measured every {every:,} steps, and --ckpt-freq is "
            f"{config.ckpt_freq:,}"
        )


class SuiteEvaluation:
    """Measures the figures of tasks every --eval-freq steps, and after the last step."""

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer_dir: Path,
        model: PreTrainedModel,
        plan: Plan,
        layout: ParallelLayout,
    ) -> None:
        """Encode the tasks. Raises UsageError if the tokenizer does not fit the model."""
        from lib.evaluate import passes

        self._tasks = tasks
        self._plan = plan
        self._model = model
        self._layout = layout
        if not tasks:
            return
        encoder = Encoder(tokenizer_dir, 1)
        vocab_size = model.config.get_text_config().vocab_size
        require_vocabulary(encoder.vocab_size, vocab_size, tokenizer_dir)
        config = plan.config
        self._suite: EncodedSuite = passes.encode_suite(tasks, encoder, config.seq_length)
        # No pass is larger than those of training, which fit the memory.
        most = plan.division.micro_batch * config.seq_length
        self._batches = passes.plan_batches(self._suite, lambda length: most // length)
        count = self._batches.count_passes(layout.dp_size)
        cut = sum(self._suite.is_cut)
        log.detail(
            f"suite: {count:,} forward passes of each rank per evaluation"
            + (f"; {cut:,} contexts cut at the left to {config.seq_length:,} tokens" if cut else "")
        )

    def is_due(self, step: int) -> bool:
        """Return whether the tasks are evaluated after a step."""
        return bool(self._tasks) and self._plan.is_evaluated(step)

    def measure(self, step: int, advance: Callable[[int], object]) -> dict[str, float]:
        """Return the figures of all tasks for a row, and log them. All ranks must call this.

        advance: called with 1 after each forward pass.
        """
        from lib.evaluate import results, scoring

        began = time.monotonic()
        evaluated = scoring.evaluate_tasks(
            self._model, self._layout, self._tasks, self._suite, self._batches, advance
        )
        seconds = units.duration(time.monotonic() - began)
        if step == self._plan.total_steps:
            log.info(f"step {step:,}: suite, in {seconds}")
            for line in results.format_table(evaluated):
                log.info(f"  {line}")
        else:
            log.info(f"step {step:,}: suite, in {seconds}: {_describe_values(evaluated)}")
        return {key: value for result in evaluated for key, value in result.figures().items()}


def _describe_values(evaluated: list[TaskResult]) -> str:
    """Return the values of the tasks' metrics as one line."""
    return units.join_names([f"{r.task} {r.values[r.metric]:.3f}" for r in evaluated], _SHOWN)
