"""Feeding a reader: its share of each global batch, read ahead by a thread.

1. Step s takes the sample numbers [s·G, (s+1)·G) of the endless stream, G the global batch, after
   an offset that is 0 unless data was passed over.
2. Micro-batch a of reader r is numbers s·G + (a·R + r)·B … + B of them (R readers, B each).
3. A thread reads the samples of the next step while this one computes.
So readers and micro-batches only divide a range that is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lib.core import threads
from lib.tokens.order import Division
from lib.tokens.samples import IGNORED, Rows, Samples

if TYPE_CHECKING:
    from lib.tokens.streaming import Cursor

_ORDERED_AT_ONCE = 4096  # sample numbers; a few are hardly cheaper to work out than many


@dataclass(frozen=True)
class MicroBatch:
    """input_ids, labels: int64 [B, T]; labels[b, t] is the token after input_ids[b, t].

    position_ids: int64 [B, T], restarting at each document; None for 0 … T - 1. boundaries: int32,
    where documents begin and end in the B·T tokens, and the end again and again behind them, so
    that all batches of a loader have as many; None without position_ids.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; from pinned memory it does not wait."""
        parts = (self.input_ids, self.labels, self.position_ids, self.boundaries)
        return MicroBatch(*(None if part is None else part.to(device, non_blocking=True)
                            for part in parts))


@dataclass(frozen=True)
class Step:
    """This rank's part of a step, and the step's counts over all ranks.

    label_tokens: what the loss is divided by. tokens: without padding. cursor: where a stream
    stands after the step; None where the position follows from the step.
    """

    micro_batches: list[MicroBatch]
    label_tokens: int
    tokens: int
    cursor: Cursor | None = None


class Loader:
    """The micro-batches of this rank for steps [first_step, last_step)."""

    def __init__(self, samples: Samples, seed: int, division: Division, first_step: int,
                 last_step: int, device: torch.device, offset: int = 0) -> None:
        """offset: number of the first sample of step 0."""
        self.samples, self.seed, self.division = samples, seed, division
        self.first_step, self.last_step, self.offset = first_step, last_step, offset
        self.pin = device.type == "cuda"
        self._ordered_from, self._ordered = 0, np.empty((0, 0), np.int64)

    def __iter__(self) -> Iterator[Step]:
        """Return the steps, in host memory."""
        return read_ahead(map(self._read, range(self.first_step, self.last_step)))

    def _read(self, step: int) -> Step:
        d = self.division
        numbers = self._numbers(step)
        parts = numbers.reshape(d.accumulation, d.dp_size, d.micro_batch)[:, d.dp_rank]
        batches = [micro_batch(self.samples.rows(part), self.pin, self.samples.most_documents)
                   for part in parts]
        return Step(batches, *self.samples.counts(numbers))

    def _numbers(self, step: int) -> np.ndarray:
        """Return the samples of a step, those of the following ones kept at hand."""
        size = self.division.global_batch
        if not self._ordered_from <= step < self._ordered_from + len(self._ordered):
            steps = min(max(1, _ORDERED_AT_ONCE // size), self.last_step - step)
            self._ordered_from = step
            self._ordered = self.samples.stream(self.offset + step * size, steps * size, self.seed
                                                ).reshape(steps, size)
        return self._ordered[step - self._ordered_from]


def read_ahead(steps: Iterator[Step]) -> Iterator[Step]:
    """Yield steps, the next one being made by a thread while one is in use."""
    with threads.pool(name="loader") as reader:
        ahead = reader.submit(next, steps, None)
        while (ready := ahead.result()) is not None:
            ahead = reader.submit(next, steps, None)
            yield ready


def evaluation_batches(samples: Samples, batches: int, division: Division) -> Iterator[MicroBatch]:
    """Yield this rank's share of the first `batches` global batches, in the stored order.

    All ranks get the same number of micro-batches (sharded forwards are collective); where the
    samples run out, labels are all ignored, so the loss over them is that of any number of ranks.
    """
    d = division
    total = min(batches * d.global_batch, len(samples))
    per_round = d.micro_batch * d.dp_size
    for start in range(0, total, per_round):
        numbers = start + d.dp_rank * d.micro_batch + np.arange(d.micro_batch)
        batch = micro_batch(samples.rows(np.minimum(numbers, len(samples) - 1)), False,
                            samples.most_documents)
        # A copy: labels and inputs of a window are views of the same tokens.
        left_out = torch.from_numpy(numbers >= total)[:, None]
        yield replace(batch, labels=batch.labels.masked_fill(left_out, IGNORED))


def boundaries(positions: np.ndarray, documents: int) -> np.ndarray:
    """Return where documents begin and end in the tokens of rows, from positions that restart.

    int32 [documents + 1]: where there are fewer, the others are empty and at the end. A kernel
    compiled for one number would be compiled again for another, and then for any.
    """
    begins = np.flatnonzero(positions == 0)
    return np.pad(begins, (0, documents + 1 - len(begins)), constant_values=positions.size
                  ).astype(np.int32)


def micro_batch(rows: Rows, pin: bool, most_documents: int = 1) -> MicroBatch:
    """Return rows as tensors, in pinned memory if asked for. most_documents: in a row."""
    ends = None if rows.positions is None else \
        boundaries(rows.positions, len(rows.positions) * most_documents)
    tensors = (None if part is None else torch.from_numpy(part) for part in (*rows, ends))
    # Contiguous where it is pinned: a copy to the device of anything else would wait.
    return MicroBatch(*(part.contiguous().pin_memory() if pin and part is not None else part
                        for part in tensors))
