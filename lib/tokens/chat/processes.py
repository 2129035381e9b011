"""Prepare chat samples in worker processes: each renders, tokenises and masks a few rows.

A chat template is untrusted code, and Jinja uses one core at most. So it runs in worker processes
with a memory limit. Their results come back in the order of the rows.
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
    """Describes a conversation that was dropped, and why.

    partly: only some answers are lost; the others are in samples.
    """

    place: Place
    kind: str
    message: str
    partly: bool


class PreparedChats(NamedTuple):
    """Holds the samples of some rows. tokens: uint32 [N]; trained: bool [N]; lengths: int64
    [samples]."""

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    counts: ChatCounts
    dropped: list[DroppedChat]


@contextmanager
def start_workers(
    count: int, tokenizer_dir: Path, policy: ChatPolicy, sample: pa.RecordBatch | None
) -> Iterator[list[Worker]]:
    """Start worker processes for `encode_rows`, and stop them at the end.

    sample: rows of the dataset, for `ChatEncoder.tune`.
    """
    workers: list[Worker] = []
    sample_bytes = None if sample is None else _serialise_rows(sample)
    try:
        for number in range(count):
            workers.append(
                Worker(
                    f"conversations {number}",
                    _make_row_encoder,
                    tokenizer_dir,
                    policy,
                    sample_bytes,
                )
            )
        yield workers
    finally:
        for worker in workers:
            worker.close()


def encode_rows(
    workers: Sequence[Worker], rows: Iterator[pa.RecordBatch]
) -> Iterator[tuple[PreparedChats, int]]:
    """Yield the samples of each batch of rows in order, with the batch's bytes in memory."""
    busy: deque[tuple[Worker, int]] = deque()
    free = deque(workers)
    for batch in rows:
        if not free:
            worker, size = busy.popleft()
            yield worker.receive(), size
            free.append(worker)
        worker = free.popleft()
        worker.send(_serialise_rows(batch))
        busy.append((worker, batch.nbytes))
    for worker, size in busy:
        yield worker.receive(), size


def _serialise_rows(batch: pa.RecordBatch) -> bytes:
    """Return rows as an Arrow stream, which contains only the rows of a slice."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _read_rows(data: bytes) -> pa.RecordBatch:
    import pyarrow

    with pyarrow.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def _make_row_encoder(
    tokenizer_dir: Path, policy: ChatPolicy, sample: bytes | None
) -> Callable[[bytes], PreparedChats]:
    """Return the function that a worker process calls with the rows it receives."""
    chats = ChatEncoder(policy, Encoder(tokenizer_dir, 1))
    if sample:
        chats.tune([chat for chat, _ in table_rows.read_valid_rows(_read_rows(sample))])
    return lambda data: _prepare_chats(chats, _read_rows(data), policy.longest)


def _prepare_chats(chats: ChatEncoder, batch: pa.RecordBatch, longest: int) -> PreparedChats:
    """Prepare the samples of some rows.

    Raises RuntimeError if a sample would break the format of the token store.
    """
    read = list(table_rows.read_rows(batch))
    sound = [number for number, (chat, _) in enumerate(read) if isinstance(chat, Conversation)]
    conversations = [chat for chat, _ in read if isinstance(chat, Conversation)]
    encoded = chats.encode(conversations)
    begins = np.cumsum(encoded.lengths) - encoded.lengths
    if len(begins) and (
        encoded.trained[begins].any()
        or encoded.lengths.max() > longest
        or not np.logical_or.reduceat(encoded.trained, begins).all()
    ):
        raise RuntimeError("a sample has no trained token, begins with one, or is too long")
    dropped = sorted(
        [one._replace(number=sound[one.number]) for one in encoded.dropped]
        + [
            Dropped(number, chat.kind, str(chat))
            for number, (chat, _) in enumerate(read)
            if isinstance(chat, Refused)
        ]
    )
    counts = ChatCounts(
        len(read),
        sum(len(chat.messages) for chat in conversations),
        len(encoded.lengths),
        len(encoded.tokens),
        int(encoded.trained.sum()),
        int(encoded.trained[begins + 1].sum()),
        Counter(map(_name_cause, dropped)),
        encoded.stops,
        encoded.template_omissions,
        {_name_cause(one): one.message for one in reversed(dropped)},
    )
    return PreparedChats(
        encoded.tokens,
        encoded.trained,
        encoded.lengths,
        counts,
        [DroppedChat(read[one.number][1], one.kind, one.message, one.partly) for one in dropped],
    )


def _name_cause(one: Dropped) -> str:
    return f"{one.kind} in part" if one.partly else one.kind
