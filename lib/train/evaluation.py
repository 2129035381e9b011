"""The validation loss: when it is due, and what it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import nn

from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import LossSum, eval_mode
from lib.tokens.batches import MicroBatch, evaluation_batches
from lib.tokens.mixture import HeldOut
from lib.tokens.samples import IGNORED
from lib.train.plan import Plan
from lib.train.report import Report


class Evaluation:
    """Measures the loss over the first --eval-batches global batches of each validation split."""

    def __init__(self, held_out: list[HeldOut], plan: Plan, layout: ParallelLayout) -> None:
        self._held_out = held_out
        self._plan = plan
        self._layout = layout

    def is_due(self, step: int) -> bool:
        """Tell whether the validation loss is measured after a step."""
        if not self._held_out:
            return False
        every = self._plan.config.eval_freq
        return step == self._plan.total_steps or bool(every and step % every == 0)

    def measure(
        self, step: int, model: nn.Module, loss_sum: LossSum, report: Report
    ) -> dict[str, float]:
        """Return the validation loss as figures of a row; all ranks must call this."""
        began = time.monotonic()
        losses = {}
        for part in self._held_out:
            batches = evaluation_batches(
                part.samples, self._plan.config.eval_batches, self._plan.division
            )
            losses[part.name] = mean_loss(model, loss_sum, report.validating(batches), self._layout)
        loss = sum(part.weight * losses[part.name] for part in self._held_out) / sum(
            part.weight for part in self._held_out
        )
        each = (
            {f"eval/loss/{name}": each for name, each in losses.items()} if len(losses) > 1 else {}
        )
        report.validated(step, loss, began)
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), **each}


@torch.no_grad()
def mean_loss(
    model: nn.Module, loss_sum: LossSum, batches: Iterable[MicroBatch], layout: ParallelLayout
) -> float:
    """Return the mean loss over all label tokens of all ranks; all ranks must call this."""
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    tokens = 0
    with eval_mode(model):
        for batch in batches:
            total += loss_sum(batch.to(layout.device), 1.0)
            tokens += int((batch.labels != IGNORED).sum())
    loss_total, token_total = layout.total([total.item(), tokens])
    return loss_total / max(token_total, 1)
