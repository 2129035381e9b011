"""Feeding a rank from a stream: windows across documents, read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from lib.tokens.loader import Step, micro_batch, read_ahead
from lib.tokens.order import Division
from lib.tokens.samples import Rows
from lib.tokens.streaming import Cursor, Origin, Stream


class Windows:
    """The tokens of a stream, taken in runs that overlap by the token that is only a label."""

    def __init__(self, stream: Stream, cursor: Cursor) -> None:
        self._encoded, self._origins = stream.encoded(cursor), deque[Origin]()
        self._tokens, self._first = np.empty(0, np.uint32), 0
        if cursor.token:
            self.take(cursor.token)

    def take(self, count: int) -> tuple[np.ndarray, Cursor]:
        """Return the next tokens and the one after them (int64 [count + 1]), and where that is."""
        parts, there = [self._tokens], len(self._tokens)
        while there <= count:
            origin = next(self._encoded)
            self._origins.append(origin)
            parts.append(origin.block.ids)
            there += len(origin.block.ids)
        tokens = np.concatenate(parts) if len(parts) > 1 else self._tokens
        self._tokens, self._first = tokens[count:], self._first + count
        while self._origins[0].first + len(self._origins[0].block.ids) <= self._first:
            self._origins.popleft()
        return tokens[:count + 1].astype(np.int64), self._cursor()

    def _cursor(self) -> Cursor:
        origin = self._origins[0]
        offset, block = self._first - origin.first, origin.block
        document = int(np.searchsorted(block.ends, offset, side="right"))
        begin = int(block.ends[document - 1]) if document else 0
        return Cursor(origin.epoch, origin.span, int(block.places[document]), offset - begin)


class StreamLoader:
    """The micro-batches of this rank for `steps` steps, from a cursor on."""

    def __init__(self, stream: Stream, cursor: Cursor, seq_length: int, division: Division,
                 steps: int, device: torch.device) -> None:
        self.stream, self.cursor, self.steps = stream, cursor, steps
        self.seq_length, self.division = seq_length, division
        self.pin = device.type == "cuda"

    def __iter__(self) -> Iterator[Step]:
        """Return the steps, in host memory, each with the cursor after it."""
        windows = Windows(self.stream, self.cursor)
        return read_ahead(self._read(windows) for _ in range(self.steps))

    def _read(self, windows: Windows) -> Step:
        d, length = self.division, self.seq_length
        tokens, cursor = windows.take(d.accumulation * d.micro_batch * length)
        inputs, labels = (part.reshape(d.accumulation, d.micro_batch, length)
                          for part in (tokens[:-1], tokens[1:]))
        batches = [micro_batch(Rows(*part, None), self.pin)
                   for part in zip(inputs, labels, strict=True)]
        total = d.global_batch * length
        return Step(batches, total, total, cursor)
