"""What feeds a run: prepared samples, or a stream that is tokenised while training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lib.parallel.layout import gather
from lib.tokens.loader import Loader, Step
from lib.tokens.order import Division
from lib.tokens.samples import Samples
from lib.tokens.stream_loader import StreamLoader
from lib.tokens.streaming import Cursor, Stream


class Feed(ABC):
    """The data of all steps, and where a run stands in it."""

    def __init__(self, division: Division, device: torch.device) -> None:
        self._division, self._device = division, device
        self._offset, self._cursor = 0, Cursor()

    def took(self, step: Step) -> None:
        """Note that a step was used."""
        self._cursor = step.cursor

    def samples(self, step: int) -> int:
        """Return the number of the next sample after `step` steps."""
        return self._offset + step * self._division.global_batch

    @abstractmethod
    def steps(self, first: int, last: int) -> Iterator[Step]:
        """Return this rank's part of the steps [first, last)."""

    @abstractmethod
    def state(self, step: int, group: dist.ProcessGroup) -> dict[str, Any]:
        """Return where the data stands after `step` steps; all ranks must call this."""

    @abstractmethod
    def restore(self, state: dict[str, Any], step: int) -> None:
        """Let step number `step` be the next, with the data that follows a state."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Return how often all data has been seen after `step` steps."""

    @abstractmethod
    def costs(self, times: dict[str, float]) -> dict[str, float]:
        """Return figures about the loading itself; times: see Timers.read."""

    @abstractmethod
    def close(self) -> None:
        """End what works in the background."""


class SampleFeed(Feed):
    """Samples by number: step s takes [offset + s·G, offset + (s + 1)·G), G the global batch.

    The offset is 0 until data is passed over, or the global batch changes.
    """

    def __init__(self, samples: Samples, seed: int, division: Division, device: torch.device,
                 ) -> None:
        super().__init__(division, device)
        self._samples, self._seed = samples, seed

    def steps(self, first: int, last: int) -> Iterator[Step]:
        return iter(Loader(self._samples, self._seed, self._division, first, last, self._device,
                           self._offset))

    def state(self, step: int, group: dist.ProcessGroup) -> dict[str, Any]:
        return {"samples": self.samples(step)}

    def restore(self, state: dict[str, Any], step: int) -> None:
        self._offset = state["samples"] - step * self._division.global_batch

    def epoch(self, step: int) -> float:
        return self.samples(step) / len(self._samples)

    def costs(self, times: dict[str, float]) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing works in the background between steps."""


class StreamFeed(Feed):
    """A stream of which every reader has its own part, from its cursor on."""

    def __init__(self, stream: Stream, seq_length: int, division: Division, device: torch.device,
                 ) -> None:
        super().__init__(division, device)
        self._stream, self._seq_length = stream, seq_length

    def steps(self, first: int, last: int) -> Iterator[Step]:
        return iter(StreamLoader(self._stream, self._cursor, self._seq_length, self._division,
                                 last - first, self._device))

    def state(self, step: int, group: dist.ProcessGroup) -> dict[str, Any]:
        cursors = gather(asdict(self._cursor), group)  # ranks of one reader have the same
        return {"samples": self.samples(step),
                "cursors": cursors[::len(cursors) // self._division.dp_size]}

    def restore(self, state: dict[str, Any], step: int) -> None:
        self._cursor = Cursor(**state["cursors"][self._division.dp_rank])

    def epoch(self, step: int) -> float:
        return self._stream.epoch_at(self._cursor)

    def costs(self, times: dict[str, float]) -> dict[str, float]:
        self._stream.tell()
        return {"perf/loader_share": times["time/data"] / times["time/total"],
                "perf/loader_tokens_per_sec_per_device": self._stream.speed()}

    def close(self) -> None:
        self._stream.close()


def of(source: Samples | Stream, seed: int, seq_length: int, division: Division,
       device: torch.device) -> Feed:
    """Return the feed of a run, which stands at its beginning."""
    if isinstance(source, Stream):
        return StreamFeed(source, seq_length, division, device)
    return SampleFeed(source, seed, division, device)
