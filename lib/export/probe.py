"""What a model computes for a fixed row of tokens: the same before a save and after an export."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.parallel import attention
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import trial
from lib.tokens.batches import MicroBatch

_LENGTH = 16  # tokens
_SAMPLED = 256  # logits of each position
_DIGITS = 7  # of a logit, more than float32 has


def measure(model: PreTrainedModel, layout: ParallelLayout) -> list[list[float]]:
    """Return logits of the fixed row, [positions][sampled]; empty where one is NaN or infinite.

    Leaves no trace in the model or in any random state. All ranks must call this: one forward pass
    over 16 tokens.
    """
    with trial(model):
        logits = compute(model, layout.device).cpu()
    if not logits.isfinite().all():
        return []
    return [[float(f"{logit:.{_DIGITS}g}") for logit in row] for row in logits.tolist()]


def compute(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Return float32 [positions, sampled]: logits of a fixed sample of the vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)  # not the state that dropout goes on from
    tokens = torch.randint(0, vocabulary, (1, _LENGTH), generator=generator)
    sampled = torch.randperm(vocabulary, generator=generator)[:_SAMPLED].sort().values
    inputs = attention.make_inputs(model, MicroBatch(tokens, tokens).to(device))
    return model(**inputs).logits[0][:, sampled.to(device)].float()
