"""Read conversations from rows of a chat dataset, and refuse those that must not be trained on.

A user may have changed the rows with `datasets`, so the checks of stage 02 are repeated here. A row
that stage 02 would drop is refused with the same kind of error. Only a template may write control
tokens, so a message that contains one is refused too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lib.core import records
from lib.core.conversation import (
    CALLS,
    DEEPEST,
    RESERVED_KWARGS,
    ROLES,
    TEMPLATE_KWARGS,
    TEXTS,
    Conversation,
    InvalidConversation,
    Message,
    Place,
    parse_arguments,
    require_arguments,
    require_order,
    require_text,
)
from lib.tokens import columns
from lib.tokens.chat.policy import ASSISTANT

if TYPE_CHECKING:
    import pyarrow as pa


def read_rows(rows: pa.RecordBatch) -> Iterator[tuple[Conversation | InvalidConversation, Place]]:
    """Yield the conversation of each row, or the reason to refuse it, and the source of the row."""
    messages = columns.flatten_messages(rows)
    names = (*TEXTS, CALLS)
    values = [columns.list_values(columns.read_field(messages, name)) for name in names]
    turns = [
        {name: value for name, value in zip(names, turn, strict=True) if value is not None}
        for turn in zip(*values, strict=True)
    ]
    rows = columns.select_chats(rows)
    tools, weights, source, line, offset, kwargs = (
        columns.list_values(rows.column(name))
        for name in ("tools", "weights", "source", "line", "offset", TEMPLATE_KWARGS)
    )
    for row, (first, end) in enumerate(pairwise(columns.find_conversation_edges(rows))):
        place = Place(source[row] or "", line[row], offset[row])
        try:
            chat = _read_conversation(turns[first:end], tools[row], weights[row])
            yield chat._replace(template_kwargs=_read_template_kwargs(kwargs[row])), place
        except InvalidConversation as refused:
            yield refused, place


def read_valid_rows(rows: pa.RecordBatch) -> list[tuple[Conversation, Place]]:
    """Return the valid conversations in rows of a chat dataset, with their sources."""
    return [(chat, place) for chat, place in read_rows(rows) if isinstance(chat, Conversation)]


def _read_conversation(
    messages: list[Message], tools: str | None, weights: Sequence[float] | None
) -> Conversation:
    for number, message in enumerate(messages, 1):
        if message.get("role") not in ROLES:
            role = repr(message["role"])[:60] if "role" in message else "nothing"
            raise InvalidConversation(
                "unknown role",
                f"turn {number} has {role} as its role; known are {', '.join(ROLES)}",
            )
        message.setdefault("content", "")
        if CALLS in message:
            _read_calls(message, number)
        require_text(message, number)
    require_order([message["role"] for message in messages])
    if weights is not None:
        if len(weights) != len(messages):
            raise InvalidConversation(
                "weights", f"there are {len(weights)} weights for {len(messages)} turns"
            )
        if any(weight not in (0, 1) for weight in weights):
            raise InvalidConversation("weights", "a weight is neither 0 nor 1")
    return Conversation(messages, _parse_functions(tools, "tools") if tools else None, weights)


def _read_template_kwargs(text: str | None) -> dict[str, Any] | None:
    """Return the variables that a row passes to the chat template, None without any."""
    if not text:
        return None
    [kwargs] = _parse_functions(f"[{text}]", TEMPLATE_KWARGS)
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidConversation(
            "content", f"{TEMPLATE_KWARGS} contains {', '.join(taken)}, which the row itself sets"
        )
    return kwargs


def _read_calls(message: Message, number: int) -> None:
    """Read the function calls of a message, and remove the key if there are none."""
    calls = _parse_functions(message.pop(CALLS), f"{CALLS} of turn {number}")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidConversation(
                "content", f"a function call of turn {number} names no function"
            )
        require_arguments(function.get("arguments"), f"turn {number}")
    if calls:
        message[CALLS] = calls


def _parse_functions(text: str, name: str) -> list[dict[str, Any]]:
    """Parse the JSON list of functions, or of function calls, in a column."""
    try:
        functions = records.parse_json(text, DEEPEST)
    except ValueError as error:
        raise InvalidConversation(
            "content",
            f"{name} is a text that is not JSON, or is nested more than {DEEPEST} levels deep",
        ) from error
    if not isinstance(functions, list) or not all(
        isinstance(function, dict) for function in functions
    ):
        raise InvalidConversation("content", f"{name} is not a list of objects")
    try:
        json.dumps(functions, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise InvalidConversation(
            "content",
            f"{name} contains a number that is not finite, or a text that is not valid Unicode",
        ) from error
    return functions


class ControlTokens:
    """Finds control tokens in conversations.

    in_answers: tokens that answers must not contain. in_other_texts: tokens that all other texts
    must not contain.
    """

    def __init__(self, in_answers: Iterable[str], in_other_texts: Iterable[str]) -> None:
        self._patterns = {
            True: _compile_patterns(in_answers),
            False: _compile_patterns(in_other_texts),
        }

    def find_all(self, conversations: Sequence[Conversation]) -> dict[int, str]:
        """Return the error for each conversation with a control token: its index → the error.

        One search covers all conversations. They are searched one by one only if it finds a token.
        """
        joined = "\0".join(text for chat in conversations for text in _list_texts(chat))
        if not any(pattern.search(joined) for pattern in self._patterns[False]):
            return {}
        problems = {number: self._describe(chat) for number, chat in enumerate(conversations)}
        return {number: problem for number, problem in problems.items() if problem}

    def _describe(self, conversation: Conversation) -> str:
        """Describe the first control token in a conversation and its tools, "" if there is none."""
        turns = [
            (
                f"turn {number} ({message['role']})",
                message["role"] == ASSISTANT,
                [value for key, value in message.items() if key != "role"],
            )
            for number, message in enumerate(conversation.messages, 1)
        ]
        others = [
            ("a tool", False, conversation.tools),
            (TEMPLATE_KWARGS, False, conversation.template_kwargs),
        ]
        for place, is_answer, value in [*turns, *others]:
            for text in _list_strings(value):
                for pattern in self._patterns[is_answer]:
                    if match := pattern.search(text):
                        token = match[0].encode("utf-8", "backslashreplace").decode()
                        return f"{place} spells the token {token}"
        return ""


def compile_alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the tokens, the longest first."""
    longest_first = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _compile_patterns(tokens: Iterable[str]) -> list[re.Pattern[str]]:
    """Return one pattern per first letter, since such patterns search fastest."""
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token)
    return [compile_alternatives(tokens) for tokens in by_first.values()]


def _list_texts(conversation: Conversation) -> Iterator[str]:
    """Yield the strings in a conversation."""
    for message in conversation.messages:
        if len(message) == 2:  # role and content
            yield message.get("content") or ""
        else:
            yield from _list_strings(message)
    if conversation.tools:
        yield from _list_strings(conversation.tools)
    if conversation.template_kwargs:
        yield from _list_strings(conversation.template_kwargs)


def _list_strings(value: Any) -> list[str]:
    """Return the strings in nested values."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        arguments = value.get("arguments")
        # Escapes in JSON text may spell a token, which a template would write.
        is_escaped = isinstance(arguments, str) and "\\u" in arguments
        parsed = [parse_arguments(arguments)] if is_escaped else []
        value = [*value, *value.values(), *parsed]
    return (
        [text for item in value for text in _list_strings(item)]
        if isinstance(value, (list, tuple))
        else []
    )
