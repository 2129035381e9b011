"""The loss: a sum over label tokens, so that any division of the batch gives the same mean."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from lib.tokens.loader import MicroBatch
from lib.tokens.samples import IGNORED
from lib.train import distributed, sharding
from lib.train.distributed import World


def token_loss_sum(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the cross entropy summed over the label tokens of a micro-batch, float32 scalar.

    A micro-batch whose labels are all ignored gives a zero that is still part of the graph.
    """
    # Without a mask, and with positions that restart, transformers keeps documents apart.
    positions = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    logits = model(input_ids=batch.input_ids, use_cache=False, **positions).logits  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(),
                           ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[MicroBatch], world: World) -> float:
    """Return the mean loss over all label tokens of all ranks; all ranks must call this."""
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    tokens = 0
    for batch in batches:
        loss_sum += token_loss_sum(model, batch.to(world.device))
        tokens += int((batch.labels != IGNORED).sum())
    sharding.reshard(model)
    model.train()
    loss_total, token_total = distributed.total([loss_sum.item(), tokens], world)
    return loss_total / max(token_total, 1)
