"""Write the token store of a chat dataset: samples, labels, dropped conversations and a summary.

A chat template is untrusted code, and Jinja uses one core at most. So worker processes with a
memory limit render, tokenise and mask the conversations, a few rows at a time. The store contains
two further files:

    errors.jsonl            the dropped conversations, in the format of stage 02
    chat_template.jinja     the template that rendered the conversations
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from lib.core import hashing, log, manifest, units
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.conversation import Conversation, InvalidConversation
from lib.core.progress import Progress
from lib.core.workers import Pool
from lib.tokens import columns, readable
from lib.tokens.build import Tokenization
from lib.tokens.chat import conversations, counts
from lib.tokens.chat.counts import ERRORS, ChatCounts
from lib.tokens.chat.encode import ChatEncoder, DroppedChat
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.dataset import Dataset
from lib.tokens.encode import make_worker_encoder
from lib.tokens.split_writer import Sink, SplitWriter, StoreContents
from lib.tokens.store import LABEL_MASK

if TYPE_CHECKING:
    import pyarrow as pa

    from lib.core.conversation import Place

_EXAMPLES = 2
_BYTES_PER_PROCESS = 32 << 20  # of conversations
_SAMPLES = "a sample as its template writes it, ends exclusive in *.ends.bin"


class ErrorEntry(NamedTuple):
    """Describes a dropped conversation, as a line of errors.jsonl.

    partly: only some answers are lost; the others are in samples.
    """

    place: Place
    kind: str
    message: str
    partly: bool


class PreparedChats(NamedTuple):
    """Holds the samples of some rows.

    tokens: uint32 [N]. trained: bool [N]. lengths: int64 [samples].
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    counts: ChatCounts
    dropped: list[ErrorEntry]


@dataclass(frozen=True)
class ChatTokenization(Tokenization):
    """Turns a chat dataset into tokens, in worker processes that tune their own encoders."""

    policy: ChatPolicy
    unit: ClassVar[str] = "sample"

    def identity(self) -> dict[str, Any]:
        return self.policy.identity()

    def tune_encoder(self) -> None:
        """Do nothing, since each worker process tunes its own encoder."""

    def write_splits(self, directory: Path, bar: Progress) -> StoreContents:
        contents = StoreContents({}, [], {}, [])
        chats: dict[str, ChatCounts] = {}
        # A process takes seconds to start. In that time the others prepare about this many bytes.
        count = min(self.num_workers, 1 + self.dataset.total_bytes() // _BYTES_PER_PROCESS)
        with self._start_pool(count, self.dataset.sample_chats()) as pool:
            for name in self.dataset.splits:
                writer = ChatWriter(directory, name, self.dtype, self.dataset)
                writer.run(pool, bar)
                self.dataset.require_same()
                *entries, errors = writer.close()
                contents.files.extend(entries)
                contents.leftovers.append(directory / errors["path"])
                contents.counts[name] = writer.manifest_counts()
                chats[name] = writer.chats
                if name == "train":
                    examples = self._render_examples(directory, name)
                    counts.require_trainable(writer.chats, self.policy, self.dataset.path, examples)
        _join_files(contents.leftovers, directory / ERRORS)
        (directory / CHAT_TEMPLATE).write_text(self.policy.template, encoding="utf-8")
        contents.files.extend(
            manifest.file_entry(directory, directory / name, hashing.FAST)
            for name in (ERRORS, CHAT_TEMPLATE)
        )
        facts = {
            "policy": _SAMPLES,
            "label_mask": LABEL_MASK,
            "chat": self._summarise_chats(chats),
        }
        return contents._replace(facts=facts)

    def estimate_tokens(self) -> int:
        sample = self.dataset.sample_chats()
        if sample is None:
            return 0
        with self._start_pool(1, None) as pool:
            [(samples, _)] = encode_rows(pool, iter([sample]))
        chats = samples.counts
        if not chats.samples and "too long" not in chats.dropped:
            counts.require_samples(chats, self.dataset.path)
        if causes := chats.describe_causes():
            log.info(
                f"  {chats.dropped.total()} of {chats.conversations} conversations sampled from "
                f"{self.dataset.path} would be dropped: {causes}"
            )
        size = self.dataset.extent()[1]
        return round(size * chats.tokens / max(1, columns.count_content_bytes(sample)))

    def _start_pool(self, count: int, sample: pa.RecordBatch | None) -> Pool:
        """Start the worker processes for `encode_rows`.

        sample: rows of the dataset, for `ChatEncoder.tune`.
        """
        sample_bytes = None if sample is None else _serialise_rows(sample)
        return Pool(
            count, "conversations", _make_row_encoder, self.tokenizer_dir, self.policy, sample_bytes
        )

    def _summarise_chats(self, chats: dict[str, ChatCounts]) -> dict[str, Any]:
        """Return the facts that `counts.read_facts` reads."""
        stops = sorted({token for split in chats.values() for token in split.stops})
        names = self.encoder.tokenizer.convert_ids_to_tokens(stops)
        return {
            "train_on": self.policy.train_on,
            "too_long": self.policy.too_long,
            "seq_length": self.policy.longest,
            "stop_tokens": {
                str(token): str(name) for token, name in zip(stops, names, strict=True)
            },
            "splits": {name: split.to_record() for name, split in chats.items()},
        }

    def _render_examples(self, directory: Path, name: str) -> list[str]:
        """Return the first samples of a split as readable text."""
        ends = np.fromfile(directory / f"{name}.ends.bin", "<i8", _EXAMPLES).tolist()
        if not ends:
            return []
        dtype = np.dtype(self.dtype).newbyteorder("<")
        tokens = np.fromfile(directory / f"{name}.tokens.bin", dtype, ends[-1])
        packed = units.ceil_div(ends[-1], 8)
        bits = np.fromfile(directory / f"{name}.{LABEL_MASK}", np.uint8, packed)
        trained = np.unpackbits(bits, bitorder="little").astype(bool)
        return [
            readable.render_excerpt(tokens[start:end], trained[start:end], self.encoder.tokenizer)
            for start, end in zip([0, *ends], ends, strict=False)
        ]


class ChatWriter(SplitWriter):
    """Writes the samples of a chat dataset, with one label bit per token."""

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        super().__init__(directory, name, dtype, dataset)
        note = self._earlier.get("chat")
        self.chats = ChatCounts.from_record(note["counts"]) if note else ChatCounts()
        self._bits = np.array(note["bits"] if note else [], bool)  # bits of the last, partial byte
        self._labels = Sink(directory / f"{name}.{LABEL_MASK}", self.tokens // 8)
        self._errors = Sink(directory / f"{name}.{ERRORS}", note["errors"] if note else 0)
        self._sinks += [self._labels, self._errors]

    def is_valid_note(self, note: dict[str, Any]) -> bool:
        chat: Any = note.get("chat")
        try:
            return super().is_valid_note(note) and (
                not note
                or (
                    chat["errors"] >= 0
                    and all(type(bit) is bool for bit in chat["bits"])
                    and ChatCounts.from_record(chat["counts"]).samples == note["documents"]
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return False

    def run(self, pool: Pool, bar: Progress) -> None:
        """Prepare the conversations that are not in the files yet."""
        if finished := self.chats.conversations:
            log.detail(
                f"  continuing after {units.counted(finished, 'conversation')} from an "
                "interrupted run"
            )
        rows = self._dataset.chats(self.name, finished)
        for samples, size in encode_rows(pool, rows):
            self.append(samples.tokens, samples.lengths)
            self._append_labels(samples.trained)
            self._errors.write(
                np.frombuffer(b"".join(map(_make_error_line, samples.dropped)), np.uint8)
            )
            self.chats.add(samples.counts)
            counts.require_maskable(self.chats, self._dataset.path)
            bar.advance(size)
            self.save_if_due()
        self.save()

    def progress_note(self) -> dict[str, Any]:
        return {
            **super().progress_note(),
            "chat": {
                "counts": self.chats.to_record(),
                "bits": self._bits.tolist(),
                "errors": self._errors.bytes,
            },
        }

    def manifest_counts(self) -> dict[str, int]:
        return {**super().manifest_counts(), "labels": self.chats.trained}

    def close(self) -> list[dict[str, Any]]:
        """Close the files and return their manifest entries, with errors.jsonl last."""
        self._labels.write(np.packbits(self._bits, bitorder="little"))
        return super().close()

    def _append_labels(self, trained: np.ndarray) -> None:
        """Write a label bit for each token, and keep the bits of a partial byte."""
        bits = np.concatenate([self._bits, trained])
        complete = len(bits) // 8 * 8
        self._labels.write(np.packbits(bits[:complete], bitorder="little"))
        self._bits = bits[complete:]


def encode_rows(pool: Pool, rows: Iterator[pa.RecordBatch]) -> Iterator[tuple[PreparedChats, int]]:
    """Yield the samples of each batch of rows in order, with the batch's bytes in memory."""
    sizes: deque[int] = deque()

    def serialise_all() -> Iterator[bytes]:
        for batch in rows:
            sizes.append(batch.nbytes)
            yield _serialise_rows(batch)

    for samples in pool.run(serialise_all()):
        yield samples, sizes.popleft()


def _serialise_rows(batch: pa.RecordBatch) -> bytes:
    """Return rows as an Arrow stream, without the rows outside a slice."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _deserialise_rows(data: bytes) -> pa.RecordBatch:
    import pyarrow

    with pyarrow.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def _make_row_encoder(
    tokenizer_dir: Path, policy: ChatPolicy, sample: bytes | None
) -> Callable[[bytes], PreparedChats]:
    """Return the function that a worker process calls with the rows it receives."""
    chats = ChatEncoder(policy, make_worker_encoder(tokenizer_dir))
    if sample:
        rows = conversations.read_valid_rows(_deserialise_rows(sample))
        chats.tune([chat for chat, _ in rows])
    return lambda data: _prepare_chats(chats, _deserialise_rows(data), policy.longest)


def _prepare_chats(chats: ChatEncoder, batch: pa.RecordBatch, longest: int) -> PreparedChats:
    """Prepare the samples of some rows.

    Raises RuntimeError if a sample would break the format of the token store.
    """
    rows = list(conversations.read_rows(batch))
    valid = {
        number: chat for number, (chat, _) in enumerate(rows) if isinstance(chat, Conversation)
    }
    encoded = chats.encode([*valid.values()])
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    if len(starts) and (
        encoded.trained[starts].any()
        or encoded.lengths.max() > longest
        or not np.logical_or.reduceat(encoded.trained, starts).all()
    ):
        raise RuntimeError("a sample has no trained token, begins with one, or is too long")
    numbers = list(valid)
    dropped = sorted(
        [one._replace(number=numbers[one.number]) for one in encoded.dropped]
        + [
            DroppedChat(number, chat.kind, str(chat))
            for number, (chat, _) in enumerate(rows)
            if isinstance(chat, InvalidConversation)
        ]
    )
    return PreparedChats(
        encoded.tokens,
        encoded.trained,
        encoded.lengths,
        ChatCounts(
            len(rows),
            sum(len(chat.messages) for chat in valid.values()),
            len(encoded.lengths),
            len(encoded.tokens),
            int(encoded.trained.sum()),
            int(encoded.trained[starts + 1].sum()),
            Counter(map(_name_cause, dropped)),
            encoded.stops,
            encoded.template_omissions,
            {_name_cause(one): one.message for one in reversed(dropped)},
            encoded.longest,
        ),
        [ErrorEntry(rows[one.number][1], one.kind, one.message, one.partly) for one in dropped],
    )


def _name_cause(dropped: DroppedChat) -> str:
    return f"{dropped.kind} in part" if dropped.partly else dropped.kind


def _make_error_line(entry: ErrorEntry) -> bytes:
    """Return a line of errors.jsonl."""
    return (
        json.dumps(
            {
                "path": entry.place.source,
                "offset": entry.place.offset,
                "line": entry.place.line,
                "kind": entry.kind,
                "message": entry.message,
                "action": "kept in part" if entry.partly else "dropped",
            }
        ).encode()
        + b"\n"
    )


def _join_files(parts: list[Path], path: Path) -> None:
    """Write the content of several files to one."""
    with path.open("wb") as file:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)
