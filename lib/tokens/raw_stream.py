"""Stream raw shards as an endless sequence of windows, tokenised while training: `--streaming`.

1. Seed and epoch decide the order of the spans. dp rank r of W reads the spans at r, r + W, … in
   that order, so an epoch of all ranks contains every document once.
2. Worker processes tokenise the blocks of a span, one block each at a time. The order is kept.
3. The documents of a rank are concatenated and cut into windows, across document boundaries.
Each rank starts its next epoch at the end of its own part. So the position is one cursor per rank,
and is valid for that number of ranks only.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lib.core import log, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.workers import Worker
from lib.tokens import dataset_errors, order, raw_reader
from lib.tokens.batches import Cursor, DataStream, Position, Step, make_micro_batch, read_ahead
from lib.tokens.encode import Encoder, make_worker_encoder
from lib.tokens.order import Division
from lib.tokens.raw_reader import Block, SkippedRecords, find_texts
from lib.tokens.raw_shards import Fetcher, RawShards, Span
from lib.tokens.samples import SampleArrays

if TYPE_CHECKING:
    import torch

_SAMPLED_SPANS = 16
_SAMPLED_TEXTS = 200
_SAMPLED_BYTES = 20_000


@dataclass(frozen=True)
class EncodedBlock:
    """Holds the tokens of a block: concatenated documents with BOS and EOS.

    ids: uint32 [tokens]. ends: int64 [documents], exclusive. places: int64 [documents], see Block.
    skipped: the records without a text. seconds: the time that encoding took.
    """

    ids: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    skipped: SkippedRecords
    seconds: float


class RankSpan(NamedTuple):
    """Names a span that a rank reads. number: its index among the rank's spans of the epoch."""

    epoch: int
    number: int
    span: Span


class Origin(NamedTuple):
    """A block in a rank's stream. first: the index in the stream of the block's first token."""

    first: int
    rank_span: RankSpan
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
        # Blocks that workers are encoding, and the number of files that the fetcher is fetching.
        self._pending_blocks: deque[tuple[RankSpan, Worker]] = deque()
        self._pending_files = 0

    def spans(self, epoch: int) -> list[Span]:
        """Return this rank's spans of an epoch, in their order."""
        count = len(self.shards.spans)
        numbers = order.permute_positions(np.arange(count), count, self.seed, epoch)
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
                    block_texts, _ = find_texts(block, self.text_field, skipped)
                    texts += block_texts[: units.ceil_div(_SAMPLED_TEXTS, len(spans))]
            except raw_reader.MissingColumn as error:
                skipped.add(str(error), f"({span.path})")
            except raw_reader.DAMAGE as error:
                problems.append(f"{span.path}: {error}")
        if not texts:
            fields = raw_reader.read_field_names(path, span)
            if chats := dataset_errors.make_streaming_error(Path(self.shards.name), fields):
                raise chats
            problems += [f"{reason} {description}" for reason, description in skipped.first.items()]
            raise (UsageError if skipped.counts else ArtifactError)(
                f"no readable document in {self.shards}",
                found="\n".join(problems[:8]),
                expected=f"one JSON object per line, or Parquet, with the text in "
                f"`{self.text_field}` (choose another field with --streaming FIELD)",
            )
        # A cut may fall inside a character; its remaining bytes are dropped.
        return [text[:_SAMPLED_BYTES].decode("utf-8", "ignore").encode() for text in texts]

    def start(self, workers: int, tokenizer: Path, sample: list[bytes]) -> None:
        """Start the worker processes; they need some seconds until they are ready."""
        self._workers = [
            Worker(f"tokenise {i}", make_block_encoder, tokenizer, sample, self.text_field)
            for i in range(workers)
        ]

    def close(self) -> None:
        """Stop the processes that tokenise and fetch."""
        for process in (*self._workers, *filter(None, [self.shards.fetcher])):
            process.close()

    def encoded(self, cursor: Cursor) -> Iterator[Origin]:
        """Yield the encoded blocks of this rank from the start of the cursor's document on.

        Only one iterator can be used at a time: a new one discards the pending requests of an
        earlier one. Raises ArtifactError if a whole epoch contains no document.
        """
        while self._pending_blocks:
            self._pending_blocks.popleft()[1].receive()
        first = 0
        text_epoch = cursor.epoch
        workers = itertools.cycle(self._workers)
        blocks = self._read_blocks(cursor)
        while True:
            while len(self._pending_blocks) < len(self._workers):
                began = time.perf_counter()
                rank_span, block = next(blocks)
                self._reading += time.perf_counter() - began
                self._pending_blocks.append((rank_span, worker := next(workers)))
                worker.send(block)
            rank_span, worker = self._pending_blocks[0]
            encoded_block: EncodedBlock = worker.receive()
            self._pending_blocks.popleft()
            self._add_totals(encoded_block, rank_span.span)
            if len(encoded_block.ids):
                yield Origin(first, rank_span, encoded_block)
                first = first + len(encoded_block.ids)
                text_epoch = rank_span.epoch
            elif rank_span.epoch > text_epoch + 1:
                raise self._make_empty_error(text_epoch + 1)

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
        """Estimate the tokens that this rank loads per second with one reader and all workers."""
        return self._tokens / (self._reading + self._encoding / max(len(self._workers), 1))

    def describe(self, numbers: int) -> dict[str, str]:
        """Return the rows about the spans for the printed plan."""
        count = len(self.shards.spans)
        return {
            "pieces": f"{count / self.dp_size:,.1f} per rank = {count:,} of about "
            f"{units.size(self.shards.bytes // count)} / "
            f"{units.counted(self.dp_size, 'rank')}"
        }

    def _list_spans(self, cursor: Cursor) -> Iterator[RankSpan]:
        """Yield the rank's spans from the cursor on, without end."""
        for epoch in itertools.count(cursor.epoch):
            start = cursor.piece if epoch == cursor.epoch else 0
            for number, span in enumerate(self.spans(epoch)[start:], start):
                yield RankSpan(epoch, number, span)

    def _read_blocks(self, cursor: Cursor) -> Iterator[tuple[RankSpan, Block]]:
        """Yield the blocks from the cursor's document on. Count unreadable files as skipped."""
        place = cursor.place
        block_epoch = cursor.epoch
        for rank_span, path in self._fetch_ahead(self._list_spans(cursor)):
            if rank_span.epoch > block_epoch + 1:
                raise self._make_empty_error(block_epoch + 1)

            def note_long_line(at: int, span: Span = rank_span.span) -> None:
                self.skipped.add("a line longer than 16 MB", f"{span.path} at {at:,}")

            try:
                for block in raw_reader.read_blocks(
                    path, rank_span.span, place, self.text_field, note_long_line
                ):
                    block_epoch = rank_span.epoch
                    yield rank_span, block
            except raw_reader.DAMAGE as error:
                self.skipped.add(
                    "a file, or the rest of it, that cannot be read",
                    f"{rank_span.span.path}: {error}",
                )
            place = None

    def _fetch_ahead(self, sequence: Iterator[RankSpan]) -> Iterator[tuple[RankSpan, Path]]:
        """Yield each span with the path of its shard, fetching one shard ahead."""
        if (fetcher := self.shards.fetcher) is None:
            yield from (
                (rank_span, self.shards.root / rank_span.span.path) for rank_span in sequence
            )
            return
        while self._pending_files:
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
        self._pending_files += 1

    def _receive(self, fetcher: Fetcher) -> Path:
        self._pending_files -= 1
        return fetcher.receive()

    def _fetch_now(self, span: Span) -> Path:
        if self.shards.fetcher is None:
            return self.shards.root / span.path
        self._send(self.shards.fetcher, span)
        return self._receive(self.shards.fetcher)

    def _add_totals(self, encoded_block: EncodedBlock, span: Span) -> None:
        self._tokens += len(encoded_block.ids)
        self._encoding += encoded_block.seconds
        for reason, count in encoded_block.skipped.counts.items():
            self.skipped.add(reason, f"{span.path} {encoded_block.skipped.first[reason]}", count)

    def _make_empty_error(self, epoch: int) -> ArtifactError:
        self.log_skipped_records()
        return ArtifactError(
            f"the part of rank {self.dp_rank} contains no document in epoch {epoch}",
            found=str(self.shards),
            expected="other files, or fewer ranks",
        )


class TokenRuns:
    """Cuts the token stream into runs that overlap by one token.

    The last token of a run is only a label; the next run begins with it.
    """

    def __init__(self, documents: RawDocuments, cursor: Cursor) -> None:
        self._encoded = documents.encoded(cursor)
        self._origins = deque[Origin]()
        self._tokens = np.empty(0, np.uint32)
        self._first = 0
        if cursor.token:
            self.take(cursor.token)

    def take(self, count: int) -> tuple[np.ndarray, Cursor]:
        """Return the next `count` tokens and one more (int64 [count + 1]).

        Return as well the cursor of the last one, where the next run begins.
        """
        parts = [self._tokens]
        size = len(self._tokens)
        while size <= count:
            origin = next(self._encoded)
            self._origins.append(origin)
            parts.append(origin.block.ids)
            size += len(origin.block.ids)
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
            origin.rank_span.epoch,
            origin.rank_span.number,
            int(block.places[document]),
            offset - begin,
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
        """Return how many epochs of its own part this rank has read, counting whole spans."""
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


def make_block_encoder(
    tokenizer: Path, sample: Sequence[bytes], text_field: str
) -> Callable[[Block], EncodedBlock]:
    """Return the function that a worker process calls with each block.

    sample: texts for the choice of the engine.
    """
    encoder = make_worker_encoder(tokenizer)
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
