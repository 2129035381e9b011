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
_TOKENS = 16  # of a row without documents
# What config.json calls tokens that see only some of those before them.
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_NOISE = 0.05  # of the logits' spread: more than rounding in half precision, less than any leak


def settle(model: nn.Module, packing: str, seq_length: int, world: World) -> None:
    """Require what --packing needs of attention, or spare it what it does not need."""
    if packing == "documents":
        require(model, world)
    else:
        spare_mask(model, seq_length, world)


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


def spare_mask(model: nn.Module, seq_length: int, world: World) -> None:
    """Let sdpa do without a mask for rows of one document, where that changes nothing.

    To make one, transformers asks the device in each pass whether documents are packed, and the
    host waits for the answer. All ranks must call this: two forward passes over a row of 16 tokens.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in _WINDOWS]
    if config._attn_implementation != "sdpa" or not type(model)._supports_attention_backend \
            or any(isinstance(window, int) and 0 < window < seq_length for window in windows):
        return
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, _TOKENS), generator=generator)
    batch = MicroBatch(tokens, tokens).to(world.device)
    with trial(model):
        masked = model(**attention.inputs(model, batch)).logits.float()
        config._attn_implementation = attention.CAUSAL
        spared = model(**attention.inputs(model, batch)).logits.float()
    if (masked - spared).abs().max() > _NOISE * masked.std():
        config._attn_implementation = "sdpa"
