"""Read conversations from rows of a chat dataset.

A user may have changed the rows with `datasets`, so the checks of stage 02 are repeated here. A row
that stage 02 would drop gets the same kind of error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lib.core import records
from lib.core.conversation import (
    CALLS,
    DEEPEST,
    ROLES,
    TEXTS,
    Conversation,
    Message,
    Place,
    Refused,
    require_order,
    require_text,
)
from lib.tokens import columns

if TYPE_CHECKING:
    import pyarrow as pa


def read_rows(rows: pa.RecordBatch) -> Iterator[tuple[Conversation | Refused, Place]]:
    """Yield the conversation of each row, or the reason to refuse it, and the source of the row."""
    messages = columns.flatten_messages(rows)
    names = (*TEXTS, CALLS)
    values = [columns.list_values(columns.read_field(messages, name)) for name in names]
    turns = [
        {name: value for name, value in zip(names, turn, strict=True) if value is not None}
        for turn in zip(*values, strict=True)
    ]
    tools, weights, source, line, offset = (
        columns.list_values(rows.column(name))
        for name in ("tools", "weights", "source", "line", "offset")
    )
    for row, (first, end) in enumerate(pairwise(columns.find_conversation_edges(rows))):
        place = Place(source[row] or "", line[row], offset[row])
        try:
            yield _read_conversation(turns[first:end], tools[row], weights[row]), place
        except Refused as refused:
            yield refused, place


def read_valid_rows(rows: pa.RecordBatch) -> list[tuple[Conversation, Place]]:
    """Return the valid conversations in rows of a chat dataset, with their sources."""
    return [(chat, place) for chat, place in read_rows(rows) if isinstance(chat, Conversation)]


def _read_conversation(
    messages: list[Message], tools: str | None, weights: Sequence[float] | None
) -> Conversation:
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES:
            given = repr(message["role"])[:60] if "role" in message else "nothing"
            raise Refused(
                "unknown role",
                f"turn {number} has {given} as its role; known are {', '.join(ROLES)}",
            )
        message.setdefault("content", "")
        if CALLS in message:
            _read_calls(message, number)
        require_text(message, number)
    require_order([message["role"] for message in messages])
    if weights is not None:
        if len(weights) != len(messages):
            raise Refused("weights", f"there are {len(weights)} weights for {len(messages)} turns")
        if any(weight not in (0, 1) for weight in weights):
            raise Refused("weights", "a weight is neither 0 nor 1")
    return Conversation(messages, _parse_functions(tools, "tools") if tools else None, weights)


def _read_calls(message: Message, number: int) -> None:
    """Read the function calls of a message, and remove the key if there are none."""
    calls = _parse_functions(message.pop(CALLS), f"{CALLS} of turn {number}")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused("content", f"a function call of turn {number} names no function")
    if calls:
        message[CALLS] = calls


def _parse_functions(text: str, name: str) -> list[dict[str, Any]]:
    """Parse the JSON list of functions, or of function calls, in a column."""
    try:
        functions = records.parse_json(text, DEEPEST)
    except ValueError as error:
        raise Refused(
            "content",
            f"{name} is a text that is not JSON, or is nested more than {DEEPEST} levels deep",
        ) from error
    if not isinstance(functions, list) or not all(
        isinstance(function, dict) for function in functions
    ):
        raise Refused("content", f"{name} is not a list of objects")
    try:
        json.dumps(functions, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise Refused(
            "content",
            f"{name} contains a number that is not finite, or a text that is not valid Unicode",
        ) from error
    return functions
