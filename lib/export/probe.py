"""Compute logits for a fixed token sequence, to compare the trainer with an exported model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.parallel import attention
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import trial_batch, trial_mode, trial_tokens
from lib.tokens.batches import Rank

_SAMPLED = 256  # logits per position
_DIGITS = 7  # of a logit; float32 has fewer


def measure_logits(model: PreTrainedModel, layout: ParallelLayout) -> list[list[float]]:
    """Return logits for the fixed tokens, [positions][sampled], or [] if one is not finite.

    Changes neither the model nor any random state. All ranks must call this; it costs one forward
    pass over 16 tokens.
    """
    with trial_mode(model):
        logits = compute_logits(model, layout).cpu()
    if not logits.isfinite().all():
        return []
    return [[float(f"{logit:.{_DIGITS}g}") for logit in row] for row in logits.tolist()]


def compute_logits(model: PreTrainedModel, rank: Rank) -> Tensor:
    """Return the logits of a fixed sample of the vocabulary, float32 [positions, sampled]."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)  # the default generator stays as it is
    tokens = trial_tokens(model, generator=generator)
    sampled = torch.randperm(vocabulary, generator=generator)[:_SAMPLED].sort().values
    inputs = attention.make_inputs(model, trial_batch(tokens, rank))
    return model(**inputs).logits[0][:, sampled.to(rank.device)].float()
