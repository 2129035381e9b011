"""Write the rows of a chat dataset, whose columns lib/core/conversation.py describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core.conversation import CALLS, TEMPLATE_KWARGS, TEXTS, Conversation, Place
from lib.corpus import json_data, parts
from lib.corpus.arrow_arrays import join_texts, make_column
from lib.corpus.tally import ChatTotals

if TYPE_CHECKING:
    import pyarrow as pa

ROLE, CONTENT, *_OTHERS = *TEXTS, CALLS
_FIRST_OF_CHARACTER = -64  # the smallest int8 value that starts a UTF-8 character
# Estimated memory of a row and of a turn, in bytes, without their texts.
_ROW_OVERHEAD = 200
_TURN_OVERHEAD = 80


def make_schema() -> pa.Schema:
    """Return the Arrow schema of a chat dataset."""
    import pyarrow as pa

    message = pa.struct([(name, pa.large_string()) for name in (*TEXTS, CALLS)])
    return pa.schema(
        [
            ("messages", pa.large_list(message)),
            ("tools", pa.large_string()),
            ("weights", pa.large_list(pa.float32())),
            ("source", pa.large_string()),
            ("line", pa.int64()),
            ("offset", pa.int64()),
            (TEMPLATE_KWARGS, pa.large_string()),
        ]
    )


class ChatPartWriter(parts.Part):
    """Writes conversations, and counts the conversations that are written."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, make_schema())
        self._rows = _Rows()
        self.counts = ChatTotals()

    @property
    def rows(self) -> int:
        """Return the number of rows, including the rows not written yet."""
        return self._written + self._rows.rows

    def add(self, chat: Conversation, place: Place, encoded: EncodedChat) -> None:
        """Add a row. encoded: the conversation."""
        if self._rows.size + encoded[-1] > parts.BATCH_BYTES and self._rows.rows:
            self.flush()
        self._rows.append(chat, place, encoded)

    def flush(self) -> None:
        """Write the collected rows as one batch."""
        if not self._rows.rows:
            return
        batch = self._rows.batch()
        self._file.write(batch.serialize())
        self._rows.add_to(self.counts)
        self.counts.characters += count_characters(batch)
        self._written += self._rows.rows
        self.text_bytes += sum(map(len, self._rows.contents))
        self._rows = _Rows()


def count_characters(batch: pa.RecordBatch) -> int:
    """Return the number of characters in the contents of a batch.

    A character is counted at its first byte; UTF-8 continuation bytes are not counted.
    """
    import numpy as np

    data = np.frombuffer(batch["messages"].values.field(CONTENT).buffers()[2] or b"", np.int8)
    return int(np.count_nonzero(data >= _FIRST_OF_CHARACTER))


# The contents of the turns, their optional fields (index of the turn, name of the field, text), the
# tools, the variables for the template, and the estimated memory of the row in bytes.
EncodedChat = tuple[list[bytes], list[tuple[int, str, bytes]], "bytes | None", "bytes | None", int]


def encode_chat(chat: Conversation) -> EncodedChat:
    """Return the texts of a conversation in UTF-8, and the memory that its row needs.

    Raises UnicodeEncodeError if its text contains lone surrogates, and json_data.UnwritableValue if
    its tools, their arguments or its variables cannot be stored as JSON.
    """
    contents = [message[CONTENT].encode() for message in chat.messages]
    size = sum(map(len, contents)) + _ROW_OVERHEAD + _TURN_OVERHEAD * len(contents)
    others: list[tuple[int, str, bytes]] = []
    for number, message in enumerate(chat.messages):
        if len(message) > 2:
            others += [
                (
                    number,
                    name,
                    json_data.dump_json(message[name]) if name == CALLS else message[name].encode(),
                )
                for name in _OTHERS
                if name in message
            ]
    tools = json_data.dump_json(chat.tools) if chat.tools else None
    kwargs = json_data.dump_json(chat.template_kwargs) if chat.template_kwargs else None
    if tools or others or kwargs:
        size += len(tools or b"") + len(kwargs or b"") + sum([len(text) for *_, text in others])
    return contents, others, tools, kwargs, size


class _Rows:
    """Collects conversations column by column, which creates few Python objects.

    size: estimated memory in bytes. contents: the contents of all turns.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self.contents: list[bytes] = []
        self._roles: list[str] = []
        self._ends = [0]  # number of turns up to the end of each row
        # Most turns and rows lack these fields, so they are stored by the index of the turn or row.
        self._others: dict[str, dict[int, bytes]] = {name: {} for name in _OTHERS}
        self._tools: dict[int, bytes] = {}
        self._kwargs: dict[int, bytes] = {}
        self._weights: dict[int, Sequence[float]] = {}
        self._sources: list[str] = []
        self._lines: list[int | None] = []
        self._offsets: list[int | None] = []

    def append(self, chat: Conversation, place: Place, encoded: EncodedChat) -> None:
        """Add a row."""
        contents, others, tools, kwargs, size = encoded
        self._roles += [message[ROLE] for message in chat.messages]
        for number, name, text in others:
            self._others[name][len(self.contents) + number] = text
        self.contents += contents
        self._ends.append(len(self.contents))
        if tools is not None:
            self._tools[self.rows] = tools
        if kwargs is not None:
            self._kwargs[self.rows] = kwargs
        if chat.weights is not None:
            self._weights[self.rows] = chat.weights
        self._sources.append(place.source)
        self._lines.append(place.line)
        self._offsets.append(place.offset)
        self.rows += 1
        self.size += size

    def add_to(self, counts: ChatTotals) -> None:
        """Add the collected rows and turns to the counts; `flush` counts their characters."""
        counts.conversations += self.rows
        counts.turns.update(self._roles)
        counts.with_tools += len(self._tools)
        counts.with_weights += len(self._weights)

    def batch(self) -> pa.RecordBatch:
        """Return the rows as a record batch."""
        import pyarrow as pa

        kinds = make_schema()
        fields = [
            join_texts([role.encode() for role in self._roles]),
            join_texts(self.contents),
            *(_make_sparse_column(texts, len(self.contents)) for texts in self._others.values()),
        ]
        turn = kinds.field("messages").type.value_type
        messages = pa.LargeListArray.from_arrays(
            make_column(self._ends, pa.int64()),
            pa.StructArray.from_arrays(fields, fields=list(turn)),
        )
        weights = pa.nulls(self.rows, kinds.field("weights").type)
        if self._weights:
            weights = pa.array(
                map(self._weights.get, range(self.rows)), weights.type, size=self.rows
            )
        places: tuple[Sequence[Any], ...] = self._sources, self._lines, self._offsets
        arrays = [
            make_column(values, kinds.field(name).type)
            for name, values in zip(Place._fields, places, strict=True)
        ]
        tools = _make_sparse_column(self._tools, self.rows)
        kwargs = _make_sparse_column(self._kwargs, self.rows)
        return pa.record_batch([messages, tools, weights, *arrays, kwargs], schema=kinds)


def _make_sparse_column(texts: dict[int, bytes], count: int) -> pa.Array:
    """Return a column of `count` values, null at every index that `texts` does not contain."""
    import pyarrow as pa

    if not texts:
        return pa.nulls(count, pa.large_string())
    return pa.array(map(texts.get, range(count)), pa.large_binary(), size=count).view(
        pa.large_string()
    )
