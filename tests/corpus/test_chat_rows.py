# covers: lib/corpus/chat_rows.py
"""Conversations survive the round trip through Arrow columns."""

from __future__ import annotations

from lib.core.conversation import Conversation, Place
from lib.corpus import chat_rows
from lib.tokens.chat import conversations
from tests.tokens.chat import chats


def test_rows_survive_the_round_trip() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, None, "ä"]}}}
    rows = [
        (
            Conversation(
                [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "b"}]
            ),
            Place("a.jsonl", 1, 0),
        ),
        (
            Conversation(
                [
                    {"role": "user", "content": "ä"},
                    {
                        "role": "assistant",
                        "content": "",
                        "reasoning_content": "hm",
                        "tool_calls": [call, call],
                    },
                    {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"},
                    {"role": "assistant", "content": "three"},
                ],
                [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                [1.0, 0.0, 1.0, 1.0],
            ),
            Place("b/c.parquet", 17),
        ),
    ]
    batch = chats.make_batch(rows)
    assert batch.schema == chat_rows.make_schema()
    assert conversations.read_valid_rows(batch) == rows
    assert conversations.read_valid_rows(batch.slice(1)) == rows[1:]
    assert conversations.read_valid_rows(batch.slice(0, 0)) == []
