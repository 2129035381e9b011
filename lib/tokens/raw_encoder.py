"""Encode the documents of a block of a raw shard, in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lib.tokens.encode import Encoder
from lib.tokens.raw_reader import Block, SkippedRecords, find_texts


@dataclass(frozen=True)
class EncodedBlock:
    """Holds the tokens of a block: concatenated documents with BOS and EOS.

    ids: uint32 [tokens]. ends: int64 [documents], exclusive. places: int64 [documents], see Block.
    skipped: the records without a text. seconds: the time it took.
    """

    ids: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    skipped: SkippedRecords
    seconds: float


def make_block_encoder(
    tokenizer: Path, sample: Sequence[bytes], text_field: str
) -> Callable[[Block], EncodedBlock]:
    """Return a function that encodes blocks; called in the worker process.

    sample: texts for choosing the engine.
    """
    encoder = Encoder(tokenizer, 1)
    encoder.tune(sample)
    return partial(encode_block, encoder, text_field)


def encode_block(encoder: Encoder, text_field: str, block: Block) -> EncodedBlock:
    """Encode the documents of a block."""
    began = time.perf_counter()
    skipped = SkippedRecords()
    texts, places = find_texts(block, text_field, skipped)
    ids, lengths = encoder.encode(texts) if texts else (np.empty(0, np.uint32), np.empty(0, int))
    return EncodedBlock(
        ids, np.cumsum(lengths), np.array(places, np.int64), skipped, time.perf_counter() - began
    )
