"""Processes that make samples of conversations: each renders, tokenises and masks a few rows.

A template is text of others that runs here, and Jinja holds one core at most. So it runs in
processes of its own, with a limit of memory, and their answers come in the order of the rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lib.core.conversation import Conversation, Refused
from lib.core.workers import Worker
from lib.tokens.chat import table_rows
from lib.tokens.chat.encoder import ChatEncoder, Dropped
from lib.tokens.chat.outcome import ChatCounts
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.encode import Encoder

if TYPE_CHECKING:
    import pyarrow as pa

    from lib.core.conversation import Place


class DroppedChat(NamedTuple):
    """Names a conversation of a dataset that gave no sample, and says why.

    partly: some of its answers did.
    """

    place: Place
    kind: str
    message: str
    partly: bool


class PreparedChats(NamedTuple):
    """Holds what became of some rows. tokens: uint32 [N]; trained: bool [N]; lengths: int64
    [samples]."""

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    counts: ChatCounts
    dropped: list[DroppedChat]


@contextmanager
def started(
    count: int, tokenizer_dir: Path, policy: ChatPolicy, sample: pa.RecordBatch | None
) -> Iterator[list[Worker]]:
    """Start processes that answer rows, and end them. sample: of the rows, see ChatEncoder.tune."""
    workers: list[Worker] = []
    packed = None if sample is None else _packed(sample)
    try:
        for number in range(count):
            workers.append(
                Worker(f"conversations {number}", _prepare, tokenizer_dir, policy, packed)
            )
        yield workers
    finally:
        for worker in workers:
            worker.close()


def encoded(
    workers: Sequence[Worker], rows: Iterator[pa.RecordBatch]
) -> Iterator[tuple[PreparedChats, int]]:
    """Yield what became of rows, in their order, and how many bytes they have in memory."""
    busy: deque[tuple[Worker, int]] = deque()
    free = deque(workers)
    for batch in rows:
        if not free:
            worker, size = busy.popleft()
            yield worker.receive(), size
            free.append(worker)
        worker = free.popleft()
        worker.send(_packed(batch))
        busy.append((worker, batch.nbytes))
    for worker, size in busy:
        yield worker.receive(), size


def _packed(batch: pa.RecordBatch) -> bytes:
    """Return rows as a stream of Arrow, which leaves out what a slice does not show."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _unpacked(data: bytes) -> pa.RecordBatch:
    import pyarrow

    with pyarrow.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def _prepare(
    tokenizer_dir: Path, policy: ChatPolicy, sample: bytes | None
) -> Callable[[bytes], PreparedChats]:
    """Return what answers rows; in a worker."""
    chats = ChatEncoder(policy, Encoder(tokenizer_dir, 1))
    if sample:
        chats.tune([chat for chat, _ in table_rows.conversations(_unpacked(sample))])
    return lambda data: _encode(chats, _unpacked(data), policy.longest)


def _encode(chats: ChatEncoder, batch: pa.RecordBatch, longest: int) -> PreparedChats:
    """Return what becomes of rows; RuntimeError where it is not what the store promises."""
    read = list(table_rows.read(batch))
    sound = [number for number, (chat, _) in enumerate(read) if isinstance(chat, Conversation)]
    several = [chat for chat, _ in read if isinstance(chat, Conversation)]
    made = chats.encode(several)
    begins = np.cumsum(made.lengths) - made.lengths
    if len(begins) and (
        made.trained[begins].any()
        or made.lengths.max() > longest
        or not np.logical_or.reduceat(made.trained, begins).all()
    ):
        raise RuntimeError("a sample has no label, begins with one, or is too long")
    dropped = sorted(
        [one._replace(number=sound[one.number]) for one in made.dropped]
        + [
            Dropped(number, chat.kind, str(chat))
            for number, (chat, _) in enumerate(read)
            if isinstance(chat, Refused)
        ]
    )
    counts = ChatCounts(
        len(read),
        sum(len(chat.messages) for chat in several),
        len(made.lengths),
        len(made.tokens),
        int(made.trained.sum()),
        int(made.trained[begins + 1].sum()),
        Counter(map(_cause, dropped)),
        made.stops,
        made.left_out,
        {_cause(one): one.message for one in reversed(dropped)},
    )
    return PreparedChats(
        made.tokens,
        made.trained,
        made.lengths,
        counts,
        [DroppedChat(read[one.number][1], one.kind, one.message, one.partly) for one in dropped],
    )


def _cause(one: Dropped) -> str:
    return f"{one.kind} in part" if one.partly else one.kind
