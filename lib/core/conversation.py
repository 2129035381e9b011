"""A conversation, and the Arrow columns in which a chat dataset keeps one per row.

Stage 02 writes them (lib/corpus/chat_rows.py), stage 04 reads them (lib/tokens/columns.py):

    messages   list<struct<role, content, reasoning_content, name, tool_call_id, tool_calls>>
    tools      string, JSON: the list of functions that the assistant may call; null without any
    weights    list<float>, one per message, 0 for an answer that is not trained; null if not given
    source     string, the file that it is from, relative to where it was collected
    line       int64, where it begins there, from 1 (a row's number in Parquet and Arrow)
    offset     int64, the byte at which it begins; null where that is not known

`tool_calls` is JSON too, since arguments have any structure; what a message has not is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]

TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")  # of a message
CALLS = "tool_calls"


class Conversation(NamedTuple):
    """Holds messages (role, content, …), tools as JSON schemas, and a weight for each message."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    weights: Sequence[float] | None = None


class Place(NamedTuple):
    """Says where a conversation begins: file, line from 1, and byte, each where it is known."""

    source: str
    line: int | None = None
    offset: int | None = None
