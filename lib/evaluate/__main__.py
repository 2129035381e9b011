"""Evaluate a model on a suite of tasks, without a network.

  python -m lib.evaluate outputs/exp --step best
  python -m lib.evaluate outputs/exp/export/step_00001000 --suite my_tasks --json results.json
  torchrun --nproc-per-node 8 -m lib.evaluate org/name --suite my_tasks --limit 200

A model is a directory with config, safetensors weights and tokenizer, or the name of a model that
stage 03 has prepared. A run stands for its newest checkpoint. A suite is a directory of tasks
(docs/how-to/evaluate.md). With torchrun, the model is sharded over the ranks; the results are the
same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, manifest, options, output_file, stage, units
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.core.progress import Progress
from lib.evaluate import tasks as task_files
from lib.evaluate.model_options import add_model_options

if TYPE_CHECKING:
    from lib.evaluate.open_model import EvaluatedModel
    from lib.evaluate.results import TaskResult
    from lib.evaluate.tasks import Task
    from lib.parallel.layout import ParallelLayout

_BATCH = 16
_SHOWN = 6  # tasks in an error


def main(argv: list[str]) -> None:
    """Read the suite, load the model, score the tasks and print the table."""
    opts = parse(argv)
    suite_dir = task_files.find_suite(opts.suite, opts.cache_dir)
    tasks = task_files.read_suite(suite_dir, opts.limit)

    from lib.evaluate import open_model

    source = open_model.find_evaluated_model(opts.model, opts.cache_dir, opts.step, opts.model_name)
    log.info(
        f"suite: {suite_dir}, {units.counted(len(tasks), 'task')}, "
        f"{units.counted(task_files.count_requests(tasks), 'text')} to score"
    )

    from lib.evaluate import results
    from lib.parallel import gpus
    from lib.parallel.layout import ParallelLayout

    gpus.hide_gpus(opts.device)
    with ParallelLayout.start() as layout:
        evaluated, precision, context_length = _evaluate_model(opts, source, tasks, layout)
        rank = layout.rank
    _require_numbers(evaluated, source.path, precision)
    if rank == 0:
        for line in results.format_table(evaluated):
            log.info(line)
        _report_cut(evaluated, context_length)
        if opts.json:
            content = {
                "model": str(source.path),
                "suite": str(suite_dir),
                "limit": opts.limit,
                "precision": precision,
                "context_length": context_length,
                "tasks": {result.task: result.as_json() for result in evaluated},
            }
            output_file.write_output(opts.json, manifest.format_json(content))


def parse(argv: Sequence[str]) -> Options:
    """Return the options of the command line."""
    parser = options.Parser(__doc__, "MODEL_OR_RUN [options]")
    add_model_options(parser)
    parser.add_argument(
        "--suite",
        default=task_files.SMALL,
        metavar="DIR|NAME",
        help="directory of tasks (default: small, six tasks that come with the code)",
    )
    parser.add_argument(
        "--limit",
        type=options.positive_int,
        metavar="N",
        help="use the first N items of each task (default: all)",
    )
    parser.add_argument(
        "--batch-size",
        type=options.positive_int,
        default=_BATCH,
        metavar="N",
        help="texts in a forward pass",
    )
    parser.add_argument(
        "--max-length",
        type=options.positive_int,
        metavar="N",
        help="context length in tokens; a longer prompt is cut at the left (default: the "
        "model's maximum)",
    )
    output_file.add_json_option(parser, "figures", "model", "suite", "tasks")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    return parser.parse(argv)


def _evaluate_model(
    opts: Options, source: EvaluatedModel, tasks: Sequence[Task], layout: ParallelLayout
) -> tuple[list[TaskResult], str, int]:
    """Return the results, the precision and the context length. All ranks must call this."""
    from lib.evaluate import open_model, passes, scoring
    from lib.models.architecture import read_config
    from lib.parallel import loss
    from lib.tokens.build import require_vocabulary
    from lib.tokens.encode import Encoder

    began = time.monotonic()
    # The config and the tokenizer are checked first, since loading the weights may take minutes.
    config = read_config(source.directory, opts.trust_remote_code).get_text_config()
    encoder = Encoder(source.directory, 1)
    require_vocabulary(encoder.vocab_size, config.vocab_size, source.directory)
    context_length = open_model.choose_context_length(config, opts.max_length)
    suite = passes.encode_suite(tasks, encoder, context_length)
    precision = opts.precision or open_model.choose_precision(layout)
    model = open_model.load_model(source, precision, layout, opts.trust_remote_code)
    loss.chunk_loss(model, layout)
    plan = passes.plan_batches(suite, lambda _: opts.batch_size)
    count = plan.count_passes(layout.dp_size)
    with Progress("evaluating", count, "batches", not opts.no_progress) as bar:
        evaluated = scoring.evaluate_tasks(model, layout, tasks, suite, plan, bar.advance)
    log.info(f"{precision}, {units.duration(time.monotonic() - began)}")
    return evaluated, precision, context_length


def _require_numbers(evaluated: Sequence[TaskResult], model: Path, precision: str) -> None:
    """Raise UsageError if the model computes NaN, so that its answers mean nothing."""
    if unknown := [result.task for result in evaluated if not result.is_known]:
        raise UsageError(
            f"the log-likelihoods of {model} are NaN",
            expected="intact weights, and a --precision in which they do not overflow",
            found=f"NaN in {units.join_names(unknown, _SHOWN)}, with --precision {precision}",
        )


def _report_cut(evaluated: Sequence[TaskResult], context_length: int) -> None:
    """Log how many prompts did not fit the context length."""
    for result in evaluated:
        if result.cut:
            log.info(
                f"{result.task}: {units.counted(result.cut, 'prompt')} cut at the left to the "
                f"context length of {context_length:,} tokens"
            )


if __name__ == "__main__":
    sys.argv[0] = "lib.evaluate"
    stage.run_main(main, only_shows=True)
