"""Compute the log-likelihoods of a suite's requests with a model that may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel

from lib.evaluate.passes import BatchPlan, EncodedSuite
from lib.evaluate.results import TaskResult, compute_results
from lib.evaluate.tasks import Task
from lib.parallel import loss
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import trial_mode
from lib.tokens.samples import IGNORED


def evaluate_tasks(
    model: PreTrainedModel,
    layout: ParallelLayout,
    tasks: Sequence[Task],
    suite: EncodedSuite,
    plan: BatchPlan,
    advance: Callable[[int], object] = lambda passes: None,
) -> list[TaskResult]:
    """Return the results of tasks, the same on all ranks. All ranks must call this.

    The model is not changed or compiled. advance: called with 1 after each forward pass; it may
    raise an error, on all ranks after the same pass.
    """
    return compute_results(tasks, suite, score_requests(model, layout, suite, plan, advance))


def score_requests(
    model: PreTrainedModel,
    layout: ParallelLayout,
    suite: EncodedSuite,
    plan: BatchPlan,
    advance: Callable[[int], object] = lambda passes: None,
) -> np.ndarray:
    """Return the log-likelihood of each distinct request in nats, float64 [requests].

    Data-parallel ranks take every n-th batch. Each makes the same number of forward passes, because
    the passes of a sharded model are collective.
    """
    computed = []
    with trial_mode(model):
        for batch, rows in plan.of_rank(layout.dp_rank, layout.dp_size):
            on_device = batch.to(layout)
            losses = loss.measure_token_losses(model, on_device).double()
            losses = losses.masked_fill(on_device.labels == IGNORED, 0.0)
            computed.append((rows, losses.sum(1)))
            advance(1)
    by_row = np.zeros(len(suite.rows))
    for rows, sums in computed:
        by_row[[row.number for row in rows]] = -sums[: len(rows)].cpu().numpy()
    # Ranks that share a row have a part of its value each; ranks with other rows have 0.
    by_row = np.array(layout.sum_over_ranks(by_row.tolist()))
    totals = np.zeros(len(suite.tokens))
    np.add.at(totals, [row.request for row in suite.rows], by_row)
    return totals
