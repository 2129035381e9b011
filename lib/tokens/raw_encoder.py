"""Encode the documents of a block of a raw shard, in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lib.tokens.encode import Encoder
from lib.tokens.raw_reader import Block, LeftOut, find_texts


@dataclass(frozen=True)
class Encoded:
    """Holds the tokens of a block, documents one after the other with BOS and EOS.

    ids: uint32 [tokens]. ends: int64 [documents], exclusive. places: int64 [documents], see Block.
    seconds: of work.
    """

    ids: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    left: LeftOut
    seconds: float


def block_encoder(
    tokenizer: Path, sample: Sequence[bytes], text_field: str
) -> Callable[[Block], Encoded]:
    """Return what encodes blocks, the engine chosen on a sample; called in the worker process."""
    encoder = Encoder(tokenizer, 1)
    encoder.tune(sample)
    return partial(encode_block, encoder, text_field)


def encode_block(encoder: Encoder, text_field: str, block: Block) -> Encoded:
    """Return the tokens of a block's documents."""
    began = time.perf_counter()
    left = LeftOut()
    texts, places = find_texts(block, text_field, left)
    ids, lengths = encoder.encode(texts) if texts else (np.empty(0, np.uint32), np.empty(0, int))
    return Encoded(
        ids, np.cumsum(lengths), np.array(places, np.int64), left, time.perf_counter() - began
    )
