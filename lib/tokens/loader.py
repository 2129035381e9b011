"""Feeding a rank: its share of each global batch, read ahead by a thread.

1. Step s takes the sample numbers [s·G, (s+1)·G) of the endless stream, G the global batch.
2. Micro-batch a of rank r is numbers s·G + (a·W + r)·B … + B of them (W ranks, B per rank).
3. A thread reads the windows of the next step while this one computes.
So ranks and micro-batches only divide a range that is the same for every world size.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from lib.tokens import order
from lib.tokens.order import Division
from lib.tokens.windows import Windows

IGNORED = -100  # the label that no loss is computed for


@dataclass(frozen=True)
class MicroBatch:
    """input_ids, labels: int64 [B, T]; labels[b, t] is the token after input_ids[b, t]."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; from pinned memory it does not wait."""
        return MicroBatch(self.input_ids.to(device, non_blocking=True),
                          self.labels.to(device, non_blocking=True))


class Loader:
    """The micro-batches of this rank for steps [first_step, last_step)."""

    def __init__(self, windows: Windows, seed: int, division: Division, first_step: int,
                 last_step: int, device: torch.device) -> None:
        self.windows, self.seed, self.division = windows, seed, division
        self.first_step, self.last_step = first_step, last_step
        self.pin = device.type == "cuda"

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Yield, per step, the list of its micro-batches in host memory."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            ahead = reader.submit(self._read, self.first_step)
            for step in range(self.first_step, self.last_step):
                batch = ahead.result()
                if step + 1 < self.last_step:
                    ahead = reader.submit(self._read, step + 1)
                yield batch

    def _read(self, step: int) -> list[MicroBatch]:
        d = self.division
        batch = []
        for a in range(d.accumulation):
            first = step * d.global_batch + (a * d.world_size + d.rank) * d.micro_batch
            samples = order.sample_numbers(first, d.micro_batch, len(self.windows), self.seed)
            batch.append(_micro_batch(self.windows.take(samples), self.pin))
        return batch


def evaluation_batches(windows: Windows, batches: int, division: Division) -> Iterator[MicroBatch]:
    """Yield this rank's share of the first `batches` global batches, in the stored order.

    All ranks get the same number of micro-batches (sharded forwards are collective); where the
    samples run out, labels are all ignored, so the loss over them is that of any world size.
    """
    d = division
    total = min(batches * d.global_batch, len(windows))
    per_round = d.micro_batch * d.world_size
    for start in range(0, total, per_round):
        samples = start + d.rank * d.micro_batch + np.arange(d.micro_batch)
        batch = _micro_batch(windows.take(np.minimum(samples, len(windows) - 1)), pin=False)
        batch.labels[torch.from_numpy(samples >= total)] = IGNORED
        yield batch


def _micro_batch(tokens: np.ndarray, pin: bool) -> MicroBatch:
    rows = torch.from_numpy(tokens)
    input_ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return MicroBatch(input_ids.pin_memory(), labels.pin_memory()) if pin \
        else MicroBatch(input_ids, labels)
