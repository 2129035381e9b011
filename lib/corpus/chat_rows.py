"""The rows of a chat dataset, as lib/core/conversation.py describes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lib.core.conversation import CALLS, TEXTS, Conversation, Place

if TYPE_CHECKING:
    import pyarrow as pa


def schema() -> pa.Schema:
    """Return the columns of a chat dataset."""
    import pyarrow as pa
    message = pa.struct([(name, pa.large_string()) for name in (*TEXTS, CALLS)])
    return pa.schema([("messages", pa.large_list(message)), ("tools", pa.large_string()),
                      ("weights", pa.large_list(pa.float32())), ("source", pa.large_string()),
                      ("line", pa.int64()), ("offset", pa.int64())])


def batch(rows: Sequence[tuple[Conversation, Place]]) -> pa.RecordBatch:
    """Return rows as Arrow holds them."""
    import pyarrow as pa
    kinds = schema()
    turns = [message for each, _ in rows for message in each.messages]
    texts: list[Iterable[str | None]] = [[turn.get(name) for turn in turns] for name in TEXTS]
    calls = [_dump(turn.get(CALLS)) for turn in turns]
    struct = kinds.field("messages").type.value_type
    fields = [pa.array(column, pa.large_string()) for column in (*texts, calls)]
    ends = accumulate((len(each.messages) for each, _ in rows), initial=0)
    lists = pa.LargeListArray.from_arrays(
        pa.array(ends, pa.int64()), pa.StructArray.from_arrays(fields, fields=list(struct)))
    others = {"tools": [_dump(each.tools) for each, _ in rows],
              "weights": [each.weights for each, _ in rows],
              **{name: [getattr(place, name) for _, place in rows] for name in Place._fields}}
    arrays = [pa.array(values, kinds.field(name).type) for name, values in others.items()]
    return pa.record_batch([lists, *arrays], schema=kinds)


def _dump(value: Any) -> str | None:
    return json.dumps(value, ensure_ascii=False) if value else None
