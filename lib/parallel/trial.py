"""Run a model on a few tokens before training, without a lasting effect.

Such trials replace tables of model families. They decide how the loss is computed and which
function computes the experts, and check whether packed documents attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands
from lib.core.errors import UsageError
from lib.parallel import attention, compiling, parallelize
from lib.parallel.layout import ParallelLayout
from lib.tokens.batches import MicroBatch, Rank, find_boundaries

LENGTH = 16  # tokens of a trial row
_DOCUMENTS = (9, 15)  # tokens of the two documents in each row that `require_isolation` tries
# Shares of the logits' standard deviation. Random weights may leak only little, 0.001 for LFM2. The
# larger one is above rounding, if a token's rounding depends on other tokens (experts).
_LEAK = 1e-4
_ROUNDED_LEAK = 0.05


class SingleDevice(NamedTuple):
    """A device in place of a `ParallelLayout`, for trials outside a process group."""

    device: torch.device
    context: None = None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the context, and reshard the model at its end."""
    model.eval()
    try:
        yield
    finally:
        parallelize.reshard_model(model)
        model.train()


@contextmanager
def trial_mode(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout, gradients or compilation inside the context.

    torch would compile a first graph for the few tokens of a trial, and then a slower one for any
    number of tokens, which training would use.
    """
    with torch.no_grad(), compiling.pause_compiling(), eval_mode(model):
        yield


def trial_tokens(
    model: PreTrainedModel,
    rows: int = 1,
    length: int = LENGTH,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the same random tokens each time, int64 [rows, length], on the CPU.

    generator: one that the caller has seeded and continues to use (default: a new one, seed 0).
    The global random state does not change.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def trial_batch(
    tokens: Tensor, rank: Rank, documents: Sequence[int] = (), divided: bool = False
) -> MicroBatch:
    """Return tokens as a micro-batch on a rank's device.

    tokens: int64 [rows, T]. documents: the lengths of the packed documents in each row, whose sum
    is T; if empty, a row is one document. divided: return only the part of each row that the rank
    computes in training. The labels are the tokens themselves.
    """
    rank = rank if divided else SingleDevice(rank.device)
    if not documents:
        return MicroBatch(tokens, tokens).to(rank)
    positions = torch.cat([torch.arange(length) for length in documents]).repeat(len(tokens), 1)
    ends = torch.from_numpy(find_boundaries(positions.numpy()))
    return MicroBatch(tokens, tokens, positions, ends).to(rank)


def require_isolation(model: PreTrainedModel, layout: ParallelLayout) -> None:
    """Raise UsageError if the second of two packed documents depends on the first.

    All ranks must call this. It runs four forward passes over two rows of 24 tokens, which are
    divided over ranks as those of training.
    """

    def compute_logits(tokens: Tensor) -> Tensor:
        batch = trial_batch(tokens, layout, _DOCUMENTS, divided=True)
        logits = model(**attention.make_inputs(model, batch)).logits
        return batch.context.gather_rows(logits)[:, : tokens.shape[1]] if batch.context else logits

    difference = find_dependence(model, compute_logits)
    if difference is not None:
        raise UsageError(
            f"with {model.config.model_type} models, packed documents see each other",
            found=f"the logits of a document change by {difference:.3g} if the document before it "
            "in the same sample changes",
            hint="--packing none gives each document or conversation a row of its own; "
            "--packing concat joins them and cuts them, so they see each other:",
            run=commands.as_typed("--packing", "none"),
        )


def find_dependence(
    model: PreTrainedModel, compute_logits: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return how much the second of two documents depends on the first, None for not at all.

    compute_logits: returns the logits of the model [rows, T, V] for tokens, int64 [rows, T]; it is
    called four times. In a causal model, the tokens after a document can only change how its logits
    are rounded; this is measured to tell rounding from a dependence.
    """
    first, second = _DOCUMENTS
    tokens = trial_tokens(model, 2, first + second)
    with trial_mode(model):
        difference, deviation = _measure_change(compute_logits, tokens, slice(first, None))
        rounding, _ = _measure_change(compute_logits, tokens, slice(0, first))
    is_dependent = difference > (_ROUNDED_LEAK if rounding else _LEAK) * deviation
    return difference if is_dependent else None


def _measure_change(
    compute_logits: Callable[[Tensor], Tensor], tokens: Tensor, document: slice
) -> tuple[Tensor, Tensor]:
    """Return how much the logits of a document change if the other one in its row changes.

    The two variants of the row are one batch, which is computed a second time with its rows
    swapped. So both passes contain the same tokens, and numbers that a layer takes from all tokens,
    such as the scale of float8, stay the same: only other tokens of its row can change a document.

    tokens: int64 [2, T], two rows of the documents of `_DOCUMENTS`. document: its place in a row.
    Returns the largest change, and the standard deviation of the logits.
    """
    rows = tokens.clone()
    rows[1, document] = rows[0, document]
    logits, swapped_logits = [
        compute_logits(batch)[:, document].float() for batch in (rows, rows.flip(0))
    ]
    return (logits - swapped_logits).abs().max(), logits.std()
