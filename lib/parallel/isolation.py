"""What tokens see of each other: tried on the model itself, not looked up by family."""

from __future__ import annotations

import torch
from torch import nn

from lib.core import commands
from lib.core.errors import UsageError
from lib.parallel import attention
from lib.parallel.layout import World
from lib.parallel.loss import trial
from lib.tokens.loader import MicroBatch, boundaries

_LENGTHS = (9, 14)  # of two documents in one row
_NOISE = 0.05  # of the logits' spread: more than rounding in half precision, less than any leak


def require(model: nn.Module, world: World) -> None:
    """Raise UsageError when the second of two packed documents depends on the first.

    All ranks must call this: two forward passes over a row of 23 tokens.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)  # not the state that dropout goes on from
    tokens = torch.randint(0, vocabulary, (2, sum(_LENGTHS)), generator=generator)
    tokens[1, _LENGTHS[0]:] = tokens[0, _LENGTHS[0]:]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    ends = torch.from_numpy(boundaries(positions.numpy(), len(_LENGTHS)))
    with trial(model):
        batches = [MicroBatch(row[None], row[None], positions, ends).to(world.device)
                   for row in tokens]
        second = [model(**attention.inputs(model, batch)).logits[0, _LENGTHS[0]:].float()
                  for batch in batches]
    moved = (second[0] - second[1]).abs().max()
    if moved > _NOISE * second[0].std():
        raise UsageError(f"with {model.config.model_type} models, packed documents see each other",
                         found=f"logits of a document move by {moved:.3g} when the one before it "
                               "in the same sample is changed",
                         hint="take another --attention or another family of models, or windows:",
                         run=commands.again("--packing", "concat"))
