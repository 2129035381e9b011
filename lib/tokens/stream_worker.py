"""What a worker process does with a block: find the text of each document and encode it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lib.tokens.encode import Encoder
from lib.tokens.shard_reader import Block

try:
    import orjson
    _fast: Callable[[bytes], Any] = orjson.loads
except ImportError:
    _fast = json.loads

_NAMES_SHOWN = 8


@dataclass
class Left:
    """What is left out: how often for each reason, and the words for the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, words: str = "", count: int = 1) -> None:
        """Note documents that are left out."""
        self.first.setdefault(reason, words)  # first: another thread may read, by the counts
        self.counts[reason] = self.counts.get(reason, 0) + count


@dataclass(frozen=True)
class Encoded:
    """ids: uint32 [tokens], documents one after the other with BOS and EOS.

    ends: int64 [documents], exclusive. places: int64 [documents], see Block. seconds: of work.
    """

    ids: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    left: Left
    seconds: float


def prepare(tokenizer: Path, sample: Sequence[bytes], text_field: str,
            ) -> Callable[[Block], Encoded]:
    """Return what encodes blocks, the engine chosen on a sample; called in the worker process."""
    encoder = Encoder(tokenizer, 1)
    encoder.tune(sample)
    return partial(encode, encoder, text_field)


def encode(encoder: Encoder, text_field: str, block: Block) -> Encoded:
    """Return the tokens of a block's documents."""
    began, left = time.perf_counter(), Left()
    texts, places = texts_of(block, text_field, left)
    ids, lengths = encoder.encode(texts) if texts else (np.empty(0, np.uint32), np.empty(0, int))
    return Encoded(ids, np.cumsum(lengths), np.array(places, np.int64), left,
                   time.perf_counter() - began)


def texts_of(block: Block, text_field: str, left: Left) -> tuple[list[bytes], list[int]]:
    """Return the texts of a block (UTF-8) and their places; `left` notes what has none."""
    texts, places = [], []
    is_lines = isinstance(block.content, bytes)
    here = block.start
    for item in block.content.split(b"\n") if is_lines else block.content:
        place, here = here, here + (len(item) + 1 if is_lines else 1)
        if is_lines and not item.strip():
            continue
        text = _text_of(item, text_field, place, left) if is_lines else item
        if text:
            texts.append(text)
            places.append(place)
        elif text == b"" or not is_lines:
            left.add("an empty text", f"at {place:,}")
    return texts, places


def _text_of(line: bytes, text_field: str, place: int, left: Left) -> bytes | None:
    try:
        value = _parsed(line)
    except (ValueError, RecursionError) as error:
        left.add("a line that is not JSON", f"at {place:,}: {str(error).splitlines()[0]}")
        return None
    if not isinstance(value, dict):
        left.add("a line that is not a JSON object", f"at {place:,}")
        return None
    if text_field not in value:
        names = ", ".join(list(value)[:_NAMES_SHOWN]) or "no fields"
        left.add(f"no field `{text_field}`", f"at {place:,}: it has {names}")
        return None
    text = value[text_field]
    if not isinstance(text, str):
        left.add(f"`{text_field}` that is not a string", f"at {place:,}")
        return None
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _parsed(line: bytes) -> Any:
    try:
        return _fast(line)
    except (ValueError, RecursionError):  # bytes that are not UTF-8, lone surrogates, NaN
        return json.loads(line.decode("utf-8-sig", "replace"))
