"""Read this rank's share of each global batch of a run, one step ahead.

1. A step takes the samples at positions [g, g + G) of the endless stream; G is the global batch.
2. On dp rank r of W, micro-batch a takes the B samples from position g + (a·W + r)·B on.
3. A thread reads the samples of the next step while the current step computes.
So a step takes the same samples for every number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from lib.core import workers
from lib.tokens.order import Division
from lib.tokens.samples import IGNORED, SampleArrays, Samples
from lib.tokens.text_bytes import SplitText

if TYPE_CHECKING:  # importing torch takes seconds, and not every caller makes tensors
    import torch

LENGTH_DIVISORS = (8, 4, 2, 1)  # the longest document is rounded up to T divided by one of these
_TILE = 128  # tokens that a thread block of the attention kernel computes at once
_ORDERED_AT_ONCE = 4096  # sample indices; a few take hardly less time than many


class Pass(NamedTuple):
    """The size of one forward and backward pass of a rank.

    batch: number of samples. length: number of tokens per sample. context: number of ranks that
    share the tokens of each sample.
    """

    batch: int
    length: int
    context: int = 1

    @property
    def length_per_device(self) -> int:
        """Return the tokens of each sample that one device computes, which may be padded."""
        return math.ceil(self.length / self.context)

    @property
    def tokens_per_device(self) -> int:
        """Return the tokens that one device computes in one forward and backward pass."""
        return self.batch * self.length_per_device


class Share(Protocol):
    """The share of each row that a rank computes: part `rank` of `size` equal parts."""

    rank: int
    size: int


class Rank(Protocol):
    """The part of a `ParallelLayout` that decides which part of a micro-batch a rank computes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def context(self) -> Any: ...  # a lib.parallel.context.Context, which is a Share, or None


class MicroBatch(NamedTuple):
    """The samples that one rank passes through the model at once.

    input_ids, labels: int64 [B, T]; labels[b, t] is the token after input_ids[b, t], or IGNORED.
    position_ids: int64 [B, T], restarting at each document; None for 0 … T - 1 in each row.
    boundaries: int32 [documents + 1], where documents begin and end in the B·T tokens; None without
    position_ids. longest: a number of tokens that no document exceeds (`bound_document_length`);
    None for T. lengths: int64 [B], the tokens of each row before its padding; None without padding.

    If ranks share rows, a rank has [B, s] of the tokens, labels and positions, and `lengths` counts
    its own tokens. boundaries and longest are still those of the whole rows. context: the ranks
    that share the rows; None for whole rows. row_positions: the positions of whole rows, if
    documents are packed or the rows are padded for the ranks.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    boundaries: torch.Tensor | None = None
    longest: int | None = None
    lengths: torch.Tensor | None = None
    context: Any = None
    row_positions: torch.Tensor | None = None

    @property
    def row_length(self) -> int:
        """Return the tokens of a whole row."""
        return self.input_ids.shape[1] * (self.context.size if self.context else 1)

    def to(self, rank: Rank) -> MicroBatch:
        """Return the part of the micro-batch that a rank computes, on its device.

        The copy does not wait if the tensors are in pinned memory.
        """
        import torch

        mine = self.divide(rank.context)
        return MicroBatch._make(
            part.to(rank.device, non_blocking=True) if isinstance(part, torch.Tensor) else part
            for part in mine
        )

    def divide(self, context: Any) -> MicroBatch:
        """Return the part of each row that a rank computes. Call this in host memory.

        This is the only place where rows are divided, after labels and boundaries are made of whole
        rows. Positions always go along, since a model would count from 0 without them. If the ranks
        cannot share a row in equal parts, it gets a further document without labels.

        context: the ranks that share the rows; None to return the whole rows.
        """
        if context is None or self.context is not None:
            return self
        whole = self._pad_rows(-self.input_ids.shape[1] % context.size)
        mine = find_share(whole.input_ids.shape[1], context)

        def cut(part: torch.Tensor) -> torch.Tensor:
            return part[:, mine].contiguous()

        lengths = whole.lengths
        divided = whole._replace(
            input_ids=cut(whole.input_ids),
            labels=cut(whole.labels),
            position_ids=cut(whole.positions),
            lengths=None
            if lengths is None
            else (lengths - mine.start).clamp(0, mine.stop - mine.start),
            context=context,
            row_positions=whole.position_ids,
        )
        return divided._pin() if self.input_ids.is_pinned() else divided

    def _pin(self) -> MicroBatch:
        """Return the micro-batch in pinned memory, from which copies do not wait."""
        import torch

        return MicroBatch._make(
            part.pin_memory() if isinstance(part, torch.Tensor) else part for part in self
        )

    @property
    def positions(self) -> torch.Tensor:
        """Return the position of each token, int64 [B, T]. Call this on whole rows."""
        import torch

        if self.position_ids is not None:
            return self.position_ids
        rows, length = self.input_ids.shape
        return torch.arange(length).expand(rows, length)

    def _pad_rows(self, count: int) -> MicroBatch:
        """Return the micro-batch with a document of `count` tokens without labels in each row.

        If documents are not packed, the new tokens see the row, which changes nothing: they come
        last. Their positions begin at 0, since the model may have no further ones.
        """
        import torch
        import torch.nn.functional as F

        if not count:
            return self
        added = torch.arange(count).expand(len(self.input_ids), count)
        positions = torch.cat([self.positions, added], dim=1)
        is_packed = self.boundaries is not None
        return self._replace(
            input_ids=F.pad(self.input_ids, (0, count)),
            labels=F.pad(self.labels, (0, count), value=IGNORED),
            position_ids=positions,
            boundaries=torch.from_numpy(find_boundaries(positions.numpy())) if is_packed else None,
            longest=None if count > (self.longest or 0) else self.longest,
            lengths=torch.full((len(self.input_ids),), self.input_ids.shape[1])
            if self.lengths is None
            else self.lengths,
        )

    def count_pairs(self) -> int:
        """Return the sum of the squared lengths of all documents; without boundaries, of all rows.

        The padding of a packed row is a document too. Call this in host memory.
        """
        if self.boundaries is None:
            rows, length = self.input_ids.shape
            return rows * length**2
        return int(self.boundaries.long().diff().square().sum())


class Cursor(NamedTuple):
    """The position of a rank in its raw shards: token `token` of the document at `place`.

    piece: index of the span among this rank's spans of the epoch. place: where the document begins,
    as in Block; None for the first document of the span.
    """

    epoch: int = 0
    piece: int = 0
    place: int | None = None
    token: int = 0


class Position(NamedTuple):
    """The position of a run in its data.

    samples: how many samples all ranks have read together. cursor: the position of this rank in its
    raw shards, only with --streaming.
    """

    samples: int = 0
    cursor: Cursor | None = None


BEGINNING = Position()


class Step(NamedTuple):
    """This rank's part of a step, and the counts of the step over all ranks.

    label_tokens: the trained tokens, which divide the loss. tokens: all tokens except padding.
    after: the position after the step.
    """

    batches: list[MicroBatch]
    label_tokens: int
    tokens: int
    after: Position


class DataStream(ABC):
    """Provides the steps of a run. It stores no position, so a resume can start anywhere."""

    @abstractmethod
    def steps(self, position: Position, count: int) -> Iterator[Step]:
        """Return this rank's part of `count` steps from a position on, in host memory.

        A call invalidates the iterators that earlier calls returned.
        """

    @abstractmethod
    def epoch(self, position: Position) -> float:
        """Return how many epochs are done at a position."""

    def costs(self, times: dict[str, float]) -> dict[str, float]:
        """Return metrics of data loading for a row of the log. times: the result of Timers.read."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop the threads of the stream."""


class SampleStream(DataStream):
    """Reads the samples of a run by index, in the same order for any number of ranks."""

    def __init__(
        self, samples: Samples, seed: int, division: Division, device: torch.device
    ) -> None:
        self._samples = samples
        self._seed = seed
        self._division = division
        self._pin = device.type == "cuda"

    def steps(self, position: Position, count: int) -> Iterator[Step]:
        return read_ahead(self._read(position.samples, count))

    def epoch(self, position: Position) -> float:
        return position.samples / len(self._samples)

    def close(self) -> None:
        """Do nothing: no thread runs between steps."""

    def _read(self, first: int, count: int) -> Iterator[Step]:
        """Yield steps; the sample indices of many steps are computed at once."""
        d = self._division
        size = self._division.global_batch
        at_once = max(1, _ORDERED_AT_ONCE // size)
        for done in range(0, count, at_once):
            steps = min(at_once, count - done)
            ordered = self._samples.stream(first, steps * size, self._seed).reshape(steps, size)
            for numbers in ordered:
                parts = numbers.reshape(d.accumulation, d.dp_size, d.micro_batch)[:, d.dp_rank]
                batches = [
                    make_micro_batch(self._samples.read_samples(part), self._pin) for part in parts
                ]
                first += size
                yield Step(batches, *self._samples.token_counts(numbers), Position(first))


def read_ahead(steps: Iterator[Step]) -> Iterator[Step]:
    """Yield steps; a thread prepares the next step while the caller uses the current one."""
    with workers.thread_pool(name="loader") as reader:
        ahead = reader.submit(next, steps, None)
        while (ready := ahead.result()) is not None:
            ahead = reader.submit(next, steps, None)
            yield ready


def read_evaluation_batches(
    samples: Samples, batches: int, division: Division
) -> Iterator[MicroBatch]:
    """Yield this rank's share of the first `batches` global batches, in the stored order.

    All ranks get the same number of micro-batches, since sharded forward passes are collective.
    Rows after the last sample are padding: their labels are all IGNORED. So the loss is the same
    for any number of ranks.
    """
    import torch

    last = len(samples) - 1
    for numbers, is_padding in _list_evaluation_rows(samples, batches, division):
        batch = make_micro_batch(samples.read_samples(np.minimum(numbers, last)), False)
        # On a copy, since labels and inputs of a window are views of the same tokens.
        rows = torch.from_numpy(is_padding)[:, None]
        yield batch._replace(labels=batch.labels.masked_fill(rows, IGNORED))


def read_evaluation_texts(
    samples: Samples, text: SplitText, batches: int, division: Division
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield source and bytes of each label of `read_evaluation_batches`, int64 [B, T] both.

    The source is -1 where no loss counts, see SplitText.read_labels.
    """
    last = len(samples) - 1
    for numbers, is_padding in _list_evaluation_rows(samples, batches, division):
        sources, sizes = text.read_labels(samples, np.minimum(numbers, last))
        sources[is_padding] = -1
        sizes[is_padding] = 0
        yield sources, sizes


def _list_evaluation_rows(
    samples: Samples, batches: int, division: Division
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each micro-batch of an evaluation the samples, and which rows are padding."""
    d = division
    total = min(batches * d.global_batch, len(samples))
    for start in range(0, total, d.micro_batch * d.dp_size):
        numbers = start + d.dp_rank * d.micro_batch + np.arange(d.micro_batch)
        yield numbers, numbers >= total


def find_boundaries(positions: np.ndarray) -> np.ndarray:
    """Return the start of each document in the concatenated rows, then the end of the last one.

    positions: int64 [B, T], 0 where a document begins; padding counts as a document. A row always
    begins with a document, so none is longer than a row. Returns int32 [documents + 1].
    """
    begins = positions == 0
    begins[:, 0] = True
    return np.append(np.flatnonzero(begins), positions.size).astype(np.int32)


def bound_document_length(boundaries: np.ndarray, seq_length: int) -> int:
    """Return a length that no document exceeds: T, T/2, T/4 or T/8 tokens, T = seq_length.

    For each document, the attention kernel starts the thread blocks that a document of this length
    needs. If the kernel were given the length of a row, most of these would be idle. Only a few
    lengths are returned, since torch may compile a graph for each. Lengths below a tile of the
    kernel would save nothing.
    """
    longest = int(np.diff(boundaries).max())
    lengths = (math.ceil(seq_length / parts) for parts in LENGTH_DIVISORS)
    return next(
        length
        for length in lengths
        if longest <= length and (length >= _TILE or length == seq_length)
    )


def find_share(length: int, share: Share) -> slice:
    """Return the columns of a row that a rank computes. length: a multiple of the ranks."""
    size = length // share.size
    return slice(share.rank * size, (share.rank + 1) * size)


def cut_array(rows: np.ndarray, share: Share | None, fill: int) -> np.ndarray:
    """Return the columns that a rank computes, as `MicroBatch.divide` does.

    rows: [B, T]. share: None for all columns. fill: the value of tokens that pad the rows.
    """
    if share is None:
        return rows
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % share.size)), constant_values=fill)
    return padded[:, find_share(padded.shape[1], share)]


def make_micro_batch(rows: SampleArrays, pin: bool) -> MicroBatch:
    """Return samples as a micro-batch of tensors. pin: put the tensors into pinned memory."""
    import torch

    ends = None if rows.positions is None else find_boundaries(rows.positions)
    longest = None if ends is None else bound_document_length(ends, rows.inputs.shape[1])
    arrays = (rows.inputs, rows.labels, rows.positions, ends, rows.lengths)
    tensors = (None if part is None else torch.from_numpy(part) for part in arrays)
    # Pinned tensors must be contiguous; otherwise the copy to the device would wait.
    inputs, labels, positions, places, lengths = (
        part.contiguous().pin_memory() if pin and part is not None else part for part in tensors
    )
    assert inputs is not None and labels is not None, "rows without tokens"
    return MicroBatch(inputs, labels, positions, places, longest, lengths)
