"""Stream raw shards as an endless sequence of windows, tokenised while training: `--streaming`.

1. Seed and epoch decide the order of the spans. dp rank r of W reads the spans at r, r + W, … in
   that order, so an epoch of all ranks contains every document once.
2. Worker processes tokenise the blocks of a span, one block ahead each. Results keep their order.
3. The documents of a rank are concatenated and cut into windows, across document boundaries.
Each rank starts its next epoch at the end of its own part. So the position is one cursor per rank,
and is valid for that number of ranks only.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lib.core import log, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.workers import Worker
from lib.tokens import dataset_errors, order, raw_encoder, raw_reader
from lib.tokens.batches import Cursor, DataStream, Position, Step, make_micro_batch, read_ahead
from lib.tokens.order import Division
from lib.tokens.raw_encoder import EncodedBlock
from lib.tokens.raw_reader import Block, SkippedRecords
from lib.tokens.raw_shards import Fetcher, RawShards, Span
from lib.tokens.samples import SampleArrays

if TYPE_CHECKING:
    import torch

_SAMPLED_SPANS = 16
_SAMPLED_TEXTS = 200
_SAMPLED_BYTES = 20_000


class OwnSpan(NamedTuple):
    """Names a span that a rank reads, and its number among the rank's spans of the epoch."""

    epoch: int
    number: int
    span: Span


class Origin(NamedTuple):
    """Holds a block of the stream, the number of its first token, and its span."""

    first: int
    own: OwnSpan
    block: EncodedBlock


class RawDocuments:
    """Reads one rank's part of the shards, tokenised by worker processes.

    Raises UsageError if there are fewer spans than ranks.
    """

    def __init__(
        self, shards: RawShards, text_field: str, seed: int, dp_rank: int, dp_size: int
    ) -> None:
        if len(shards.spans) < dp_size:
            raise UsageError(
                f"{shards.name} has {units.counted(len(shards.spans), 'piece')} for "
                f"{units.counted(dp_size, 'rank')}",
                expected="at least one piece per rank: more files, or fewer ranks (a compressed "
                "file, or one from the Hub, is one piece)",
            )
        self.shards = shards
        self.text_field = text_field
        self.seed = seed
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.skipped = SkippedRecords()
        self._reported = 0
        self._tokens = 0
        self._reading = 1e-9  # seconds
        self._encoding = 0.0  # seconds
        self._workers: list[Worker] = []
        # Pending requests: blocks that workers encode, and the number of files to fetch.
        self._encoding_now: deque[tuple[OwnSpan, Worker]] = deque()
        self._fetching_now = 0

    def spans(self, epoch: int) -> list[Span]:
        """Return this rank's spans of an epoch, in their order."""
        count = len(self.shards.spans)
        numbers = order.permute(np.arange(count), count, self.seed, epoch)
        return [self.shards.spans[number] for number in numbers[self.dp_rank :: self.dp_size]]

    def sample(self) -> list[bytes]:
        """Return the beginnings of some documents.

        They come from all over the shards if these are local, otherwise from the first span. Raises
        UsageError if no document contains the text field, ArtifactError if none can be read.
        """
        spans = (
            self.spans(0)[:1]
            if self.shards.fetcher
            else self.shards.spans[:: units.ceil_div(len(self.shards.spans), _SAMPLED_SPANS)]
        )
        texts: list[bytes] = []
        skipped = SkippedRecords()
        problems = []
        path = Path()
        for span in spans:
            try:
                path = self._fetch_now(span)
                blocks = raw_reader.read_blocks(
                    path, span, None, self.text_field, lambda place: skipped.add("too long")
                )
                if block := next(blocks, None):
                    found, _ = raw_reader.find_texts(block, self.text_field, skipped)
                    texts += found[: units.ceil_div(_SAMPLED_TEXTS, len(spans))]
            except raw_reader.NoColumn as error:
                skipped.add(str(error), f"({span.path})")
            except raw_reader.DAMAGE as error:
                problems.append(f"{span.path}: {error}")
        if not texts:
            fields = raw_reader.read_field_names(path, span)
            if chats := dataset_errors.make_streaming_error(Path(self.shards.name), fields):
                raise chats
            problems += [f"{reason} {words}" for reason, words in skipped.first.items()]
            raise (UsageError if skipped.counts else ArtifactError)(
                f"no readable document in {self.shards}",
                found="\n".join(problems[:8]),
                expected=f"one JSON object per line, or Parquet, with the text in "
                f"`{self.text_field}` (choose another field with --text-field)",
            )
        # A cut may fall inside a character; its remaining bytes are dropped.
        return [text[:_SAMPLED_BYTES].decode("utf-8", "ignore").encode() for text in texts]

    def start(self, workers: int, tokenizer: Path, sample: list[bytes]) -> None:
        """Start the worker processes; they need some seconds until they are ready."""
        self._workers = [
            Worker(
                f"tokenise {i}", raw_encoder.make_block_encoder, tokenizer, sample, self.text_field
            )
            for i in range(workers)
        ]

    def close(self) -> None:
        """Stop the processes that tokenise and fetch."""
        for process in (*self._workers, *filter(None, [self.shards.fetcher])):
            process.close()

    def encoded(self, cursor: Cursor) -> Iterator[Origin]:
        """Yield the rank's blocks from the start of the cursor's document on.

        Only one iterator can be used at a time: a new one discards the pending requests of an
        earlier one. Raises ArtifactError if a whole epoch contains no document.
        """
        while self._encoding_now:
            self._encoding_now.popleft()[1].receive()
        first = 0
        with_text = cursor.epoch
        workers = itertools.cycle(self._workers)
        blocks = self._read_blocks(cursor)
        while True:
            while len(self._encoding_now) < len(self._workers):
                began = time.perf_counter()
                own, block = next(blocks)
                self._reading += time.perf_counter() - began
                self._encoding_now.append((own, worker := next(workers)))
                worker.send(block)
            own, worker = self._encoding_now[0]
            done: EncodedBlock = worker.receive()
            self._encoding_now.popleft()
            self._add_totals(done, own.span)
            if len(done.ids):
                yield Origin(first, own, done)
                first = first + len(done.ids)
                with_text = own.epoch
            elif own.epoch > with_text + 1:
                raise self._make_empty_error(with_text + 1)

    def log_skipped_records(self) -> None:
        """Warn about skipped records, if their number has grown since the last call."""
        if (total := sum(self.skipped.counts.values())) == self._reported:
            return
        self._reported = total
        reasons = ", ".join(
            f"{count:,} × {reason} (the first in {self.skipped.first[reason]})"
            for reason, count in list(self.skipped.counts.items())
        )
        log.warn(f"skipped so far: {reasons}")

    def speed(self) -> float:
        """Estimate the tokens per second for this rank: one thread reads, all workers encode."""
        return self._tokens / (self._reading + self._encoding / max(len(self._workers), 1))

    def describe(self, numbers: int) -> dict[str, str]:
        """Return the rows about the spans for the printed plan."""
        count = len(self.shards.spans)
        return {
            "pieces": f"{count / self.dp_size:,.1f} per rank = {count:,} of about "
            f"{units.size(self.shards.bytes // count)} / "
            f"{units.counted(self.dp_size, 'rank')}"
        }

    def _list_spans(self, cursor: Cursor) -> Iterator[OwnSpan]:
        """Yield the rank's spans from the cursor on, without end."""
        for epoch in itertools.count(cursor.epoch):
            start = cursor.piece if epoch == cursor.epoch else 0
            for number, span in enumerate(self.spans(epoch)[start:], start):
                yield OwnSpan(epoch, number, span)

    def _read_blocks(self, cursor: Cursor) -> Iterator[tuple[OwnSpan, Block]]:
        """Yield the blocks from the cursor's document on. Count unreadable files as skipped."""
        place = cursor.place
        with_block = cursor.epoch
        for own, path in self._fetch_ahead(self._list_spans(cursor)):
            if own.epoch > with_block + 1:
                raise self._make_empty_error(with_block + 1)

            def too_long(at: int, span: Span = own.span) -> None:
                self.skipped.add("a line longer than 16 MB", f"{span.path} at {at:,}")

            try:
                for block in raw_reader.read_blocks(
                    path, own.span, place, self.text_field, too_long
                ):
                    with_block = own.epoch
                    yield own, block
            except raw_reader.DAMAGE as error:
                self.skipped.add(
                    "a file, or the rest of it, that cannot be read", f"{own.span.path}: {error}"
                )
            place = None

    def _fetch_ahead(self, sequence: Iterator[OwnSpan]) -> Iterator[tuple[OwnSpan, Path]]:
        """Yield each span with the path of its shard, fetching one shard ahead."""
        if (fetcher := self.shards.fetcher) is None:
            yield from ((own, self.shards.root / own.span.path) for own in sequence)
            return
        while self._fetching_now:
            self._receive(fetcher)
        ahead = next(sequence)
        self._send(fetcher, ahead.span)
        for following in sequence:
            path = self._receive(fetcher)
            self._send(fetcher, following.span)
            yield ahead, path
            ahead = following

    def _send(self, fetcher: Fetcher, span: Span) -> None:
        fetcher.send(span.path)
        self._fetching_now += 1

    def _receive(self, fetcher: Fetcher) -> Path:
        self._fetching_now -= 1
        return fetcher.receive()

    def _fetch_now(self, span: Span) -> Path:
        if self.shards.fetcher is None:
            return self.shards.root / span.path
        self._send(self.shards.fetcher, span)
        return self._receive(self.shards.fetcher)

    def _add_totals(self, done: EncodedBlock, span: Span) -> None:
        self._tokens += len(done.ids)
        self._encoding += done.seconds
        for reason, count in done.skipped.counts.items():
            self.skipped.add(reason, f"{span.path} {done.skipped.first[reason]}", count)

    def _make_empty_error(self, epoch: int) -> ArtifactError:
        self.log_skipped_records()
        return ArtifactError(
            f"the part of rank {self.dp_rank} contains no document in epoch {epoch}",
            found=str(self.shards),
            expected="other files, or fewer ranks",
        )


class TokenRuns:
    """Cuts the token stream into runs that overlap by one token, which is only a label."""

    def __init__(self, documents: RawDocuments, cursor: Cursor) -> None:
        self._encoded = documents.encoded(cursor)
        self._origins = deque[Origin]()
        self._tokens = np.empty(0, np.uint32)
        self._first = 0
        if cursor.token:
            self.take(cursor.token)

    def take(self, count: int) -> tuple[np.ndarray, Cursor]:
        """Return the next tokens with one more (int64 [count + 1]), and the cursor of that one."""
        parts = [self._tokens]
        there = len(self._tokens)
        while there <= count:
            origin = next(self._encoded)
            self._origins.append(origin)
            parts.append(origin.block.ids)
            there += len(origin.block.ids)
        tokens = np.concatenate(parts) if len(parts) > 1 else self._tokens
        self._tokens = tokens[count:]
        self._first = self._first + count
        while self._origins[0].first + len(self._origins[0].block.ids) <= self._first:
            self._origins.popleft()
        return tokens[: count + 1].astype(np.int64), self._cursor()

    def _cursor(self) -> Cursor:
        origin = self._origins[0]
        offset = self._first - origin.first
        block = origin.block
        document = int(np.searchsorted(block.ends, offset, side="right"))
        begin = int(block.ends[document - 1]) if document else 0
        return Cursor(
            origin.own.epoch, origin.own.number, int(block.places[document]), offset - begin
        )


class RawStream(DataStream):
    """Yields windows across the documents of raw shards; every rank reads its own part."""

    def __init__(
        self, documents: RawDocuments, seq_length: int, division: Division, device: torch.device
    ) -> None:
        self._documents = documents
        self._seq_length = seq_length
        self._division = division
        self._pin = device.type == "cuda"

    def steps(self, position: Position, count: int) -> Iterator[Step]:
        runs = TokenRuns(self._documents, position.cursor or Cursor())
        size = self._division.global_batch
        return read_ahead(
            self._read(runs, position.samples + number * size) for number in range(1, count + 1)
        )

    def epoch(self, position: Position) -> float:
        """Return the epochs this rank has read of its part, in whole spans."""
        cursor = position.cursor or Cursor()
        return cursor.epoch + cursor.piece / len(self._documents.spans(cursor.epoch))

    def costs(self, times: dict[str, float]) -> dict[str, float]:
        self._documents.log_skipped_records()
        return {
            "perf/loader_share": times["time/data"] / times["time/total"],
            "perf/loader_tokens_per_sec_per_device": self._documents.speed(),
        }

    def close(self) -> None:
        self._documents.close()

    def _read(self, runs: TokenRuns, samples_after: int) -> Step:
        d = self._division
        length = self._seq_length
        tokens, cursor = runs.take(d.accumulation * d.micro_batch * length)
        inputs, labels = (
            part.reshape(d.accumulation, d.micro_batch, length)
            for part in (tokens[:-1], tokens[1:])
        )
        batches = [
            make_micro_batch(SampleArrays(*part, None), self._pin)
            for part in zip(inputs, labels, strict=True)
        ]
        total = d.global_batch * length
        return Step(batches, total, total, Position(samples_after, cursor))
