"""What a model computes for a fixed row of tokens: the same before a save and after an export."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.parallel import attention
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import trial_batch, trial_mode, trial_tokens
from lib.tokens.batches import Rank

_SAMPLED = 256  # logits of each position
_DIGITS = 7  # of a logit, more than float32 has


def measure(model: PreTrainedModel, layout: ParallelLayout) -> list[list[float]]:
    """Return logits of the fixed row, [positions][sampled]; empty where one is NaN or infinite.

    Leaves no trace in the model or in any random state. All ranks must call this: one forward pass
    over 16 tokens.
    """
    with trial_mode(model):
        logits = compute(model, layout).cpu()
    if not logits.isfinite().all():
        return []
    return [[float(f"{logit:.{_DIGITS}g}") for logit in row] for row in logits.tolist()]


def compute(model: PreTrainedModel, rank: Rank) -> Tensor:
    """Return float32 [positions, sampled]: logits of a fixed sample of the vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)  # not the state that dropout goes on from
    tokens = trial_tokens(model, generator=generator)
    sampled = torch.randperm(vocabulary, generator=generator)[:_SAMPLED].sort().values
    inputs = attention.make_inputs(model, trial_batch(tokens, rank))
    return model(**inputs).logits[0][:, sampled.to(rank.device)].float()
