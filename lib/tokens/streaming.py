"""Raw shards as an endless stream of windows, tokenised while training: `--streaming`.

1. The spans of an epoch have an order drawn from seed and epoch; rank r of W takes the places
   r, r + W, … of it, so an epoch of all ranks holds every document once.
2. Worker processes tokenise blocks of a span, a block each ahead; results come in their order.
3. The documents of a rank follow each other, and are cut into windows across them.
Each rank starts its next epoch when it is through with its own part. So the state is a cursor per
rank, and belongs to that number of ranks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.core import log, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.workers import Worker
from lib.tokens import order, raw_reader
from lib.tokens.raw_reader import Block, Encoded, LeftOut
from lib.tokens.raw_shards import RawShards, Span

_SAMPLED_SPANS, _SAMPLED_TEXTS, _SAMPLED_BYTES = 16, 200, 20_000


@dataclass(frozen=True)
class Cursor:
    """Where a rank stands: the next token is number `token` of the document at `place`.

    piece: number of the span among the rank's own of the epoch. place: as in Block, None for the
    first.
    """

    epoch: int = 0
    piece: int = 0
    place: int | None = None
    token: int = 0


@dataclass(frozen=True)
class Origin:
    """A block in the stream: the number of its first token, and where its documents are from."""

    first: int
    epoch: int
    span: int
    block: Encoded


class Stream:
    """The part of the shards that one rank reads, and the processes that tokenise it.

    Raises UsageError when there are fewer spans than ranks.
    """

    def __init__(self, shards: RawShards, text_field: str, seed: int, dp_rank: int, dp_size: int,
                 ) -> None:
        if len(shards.spans) < dp_size:
            raise UsageError(f"{shards.name} has {units.counted(len(shards.spans), 'piece')} for "
                             f"{units.counted(dp_size, 'rank')}",
                             expected="a piece per rank at least: more files, or fewer ranks (a "
                                      "compressed file, and one from the Hub, is one piece)")
        self.shards, self.text_field, self.seed = shards, text_field, seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.left, self._told = LeftOut(), 0
        self._tokens, self._reading, self._encoding = 0, 1e-9, 0.0  # seconds
        self._workers: list[Worker] = []

    def spans(self, epoch: int) -> list[Span]:
        """Return this rank's spans of an epoch, in their order."""
        count = len(self.shards.spans)
        numbers = order.permute(np.arange(count), count, self.seed, epoch)
        own = numbers[self.dp_rank::self.dp_size]
        return [self.shards.spans[number] for number in own]

    def sample(self) -> list[bytes]:
        """Return the beginnings of some documents: from all over the shards where they are here,
        else from the first span.

        Raises UsageError when none has the text field, ArtifactError when none can be read.
        """
        spans = self.spans(0)[:1] if self.shards.fetcher else \
            self.shards.spans[::-(-len(self.shards.spans) // _SAMPLED_SPANS)]
        texts: list[bytes] = []
        left, problems = LeftOut(), []
        for span in spans:
            try:
                blocks = raw_reader.read(self._fetched(span), span, None, self.text_field,
                                           lambda place: left.add("too long"))
                if block := next(blocks, None):
                    found, _ = raw_reader.find_texts(block, self.text_field, left)
                    texts += found[:-(-_SAMPLED_TEXTS // len(spans))]
            except raw_reader.NoColumn as error:
                left.add(str(error), f"({span.path})")
            except raw_reader.DAMAGE as error:
                problems.append(f"{span.path}: {error}")
        if not texts:
            problems += [f"{reason} {words}" for reason, words in left.first.items()]
            raise (UsageError if left.counts else ArtifactError)(
                f"no readable document in {self.shards}", found="\n".join(problems[:8]),
                expected=f"one JSON object per line, or Parquet, with the text in "
                         f"`{self.text_field}` (--text-field names another)")
        # The cut may fall inside a character: what is left of it is dropped.
        return [text[:_SAMPLED_BYTES].decode("utf-8", "ignore").encode() for text in texts]

    def start(self, workers: int, tokenizer: Path, sample: list[bytes]) -> None:
        """Start the worker processes; they need some seconds to get ready."""
        self._workers = [Worker(f"tokenise {i}", raw_reader.block_encoder, tokenizer, sample,
                                self.text_field) for i in range(workers)]

    def close(self) -> None:
        """End the processes that tokenise and fetch."""
        for process in (*self._workers, *filter(None, [self.shards.fetcher])):
            process.close()

    def encoded(self, cursor: Cursor) -> Iterator[Origin]:
        """Yield the rank's documents from a cursor on (from the first token of its document).

        Raises ArtifactError when a whole epoch gave no document.
        """
        busy: deque[tuple[int, int, Span, Worker]] = deque()
        first, with_text, workers = 0, cursor.epoch, itertools.cycle(self._workers)
        blocks = self._blocks(cursor)
        while True:
            while len(busy) < len(self._workers):
                began = time.perf_counter()
                epoch, number, span, block = next(blocks)
                self._reading += time.perf_counter() - began
                busy.append((epoch, number, span, next(workers)))
                busy[-1][-1].send(block)
            epoch, number, span, worker = busy.popleft()
            done: Encoded = worker.receive()
            self._note(done, span)
            if len(done.ids):
                yield Origin(first, epoch, number, done)
                first, with_text = first + len(done.ids), epoch
            elif epoch > with_text + 1:
                raise self._nothing(with_text + 1)

    def tell(self) -> None:
        """Log what was left out, if there is more of it than at the last call."""
        if (total := sum(self.left.counts.values())) == self._told:
            return
        self._told = total
        reasons = ", ".join(f"{count:,} × {reason} (the first in {self.left.first[reason]})"
                            for reason, count in list(self.left.counts.items()))
        log.warn(f"left out so far: {reasons}")

    def speed(self) -> float:
        """Return how many tokens per second this rank's loader can make, about: reading goes on in
        one thread, encoding in all workers.
        """
        return self._tokens / (self._reading + self._encoding / max(len(self._workers), 1))

    def epoch_at(self, cursor: Cursor) -> float:
        """Return how often this rank's part has been gone through, in whole spans."""
        return cursor.epoch + cursor.piece / len(self.spans(cursor.epoch))

    def describe(self, numbers: int) -> dict[str, str]:
        """Return what a plan says of the spans, whatever the number of samples."""
        count = len(self.shards.spans)
        return {"pieces": f"{count / self.dp_size:,.1f} per rank = {count:,} of about "
                          f"{units.size(self.shards.bytes // count)} / "
                          f"{units.counted(self.dp_size, 'rank')}"}

    def _sequence(self, cursor: Cursor) -> Iterator[tuple[int, int, Span]]:
        """Yield epoch, number and span from the cursor's on, without end."""
        for epoch in itertools.count(cursor.epoch):
            spans = self.spans(epoch)
            start = cursor.piece if epoch == cursor.epoch else 0
            yield from ((epoch, number, spans[number]) for number in range(start, len(spans)))

    def _blocks(self, cursor: Cursor) -> Iterator[tuple[int, int, Span, Block]]:
        """Yield the blocks from the cursor's document on; what cannot be read is told and left out.
        """
        place, with_block = cursor.place, cursor.epoch
        for (epoch, number, span), path in self._at_hand(self._sequence(cursor)):
            if epoch > with_block + 1:
                raise self._nothing(with_block + 1)
            def too_long(at: int, span: Span = span) -> None:
                self.left.add("a line longer than 16 MB", f"{span.path} at {at:,}")
            try:
                for block in raw_reader.read(path, span, place, self.text_field, too_long):
                    with_block = epoch
                    yield epoch, number, span, block
            except raw_reader.DAMAGE as error:
                self.left.add("a file, or the rest of it, that cannot be read",
                              f"{span.path}: {error}")
            place = None

    def _at_hand(self, sequence: Iterator[tuple[int, int, Span]],
                 ) -> Iterator[tuple[tuple[int, int, Span], Path]]:
        """Yield what the sequence has with the path of the shard, fetched one ahead."""
        if (fetcher := self.shards.fetcher) is None:
            yield from ((entry, self.shards.root / entry[2].path) for entry in sequence)
            return
        ahead = next(sequence)
        fetcher.send(ahead[2].path)
        for following in sequence:
            path = fetcher.receive()
            fetcher.send(following[2].path)
            yield ahead, path
            ahead = following

    def _fetched(self, span: Span) -> Path:
        if self.shards.fetcher is None:
            return self.shards.root / span.path
        self.shards.fetcher.send(span.path)
        return self.shards.fetcher.receive()

    def _note(self, done: Encoded, span: Span) -> None:
        self._tokens += len(done.ids)
        self._encoding += done.seconds
        for reason, count in done.left.counts.items():
            self.left.add(reason, f"{span.path} {done.left.first[reason]}", count)

    def _nothing(self, epoch: int) -> ArtifactError:
        self.tell()
        return ArtifactError(f"the part of rank {self.dp_rank} gave no document in epoch {epoch}",
                             found=str(self.shards), expected="other files, or fewer ranks")
