"""Define conversations, and the columns of a chat dataset, which has one conversation per row.

Stage 02 writes these Arrow columns (lib/corpus/chat_rows.py), stage 04 reads them
(lib/tokens/columns.py):

    messages   list<struct<role, content, reasoning_content, name, tool_call_id, tool_calls>>
    tools      string, JSON: the list of functions that the assistant may call; null without any
    weights    list<float>, one per message, 0 for an answer that is not trained; null if not given
    chat_template_kwargs    string, JSON: variables for the chat template; null without any
    source     string, the file, relative to the source of stage 01, or else to --data-folder
    line       int64, the first line in that file, from 1 (for Parquet and Arrow, the row)
    offset     int64, the first byte in that file; null if unknown

`tool_calls` is JSON too, since arguments may have any structure. The arguments of a call are an
object, or the JSON text of an object as in OpenAI's format. Absent parts of a message are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

Message = dict[str, Any]

# The text fields of a message.
TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")
CALLS = "tool_calls"
TEMPLATE_KWARGS = "chat_template_kwargs"  # a column that older datasets lack
# Variables of a template that the conversation itself sets.
RESERVED_KWARGS = frozenset(("messages", "tools", "add_generation_prompt"))
DEEPEST = 254  # levels of nested tools and calls; orjson writes no more
ROLES = ("system", "developer", "user", "assistant", "tool")
# Role → the roles that may precede it; "" stands for the beginning of the conversation.
_FOLLOWS = {
    "user": ("", "system", "developer", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
    "system": ("",),
    "developer": ("", "system"),
}


class InvalidConversation(Exception):
    """Raised if a record is not a valid conversation. kind: the cause, as in errors.jsonl."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Conversation(NamedTuple):
    """Holds messages (role, content, …), tools as JSON schemas, and a weight per message.

    template_kwargs: further variables for the chat template.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    weights: Sequence[float] | None = None
    template_kwargs: Mapping[str, Any] | None = None


class Place(NamedTuple):
    """Locates a conversation: its file, and if known its first line (from 1) and byte."""

    source: str
    line: int | None = None
    offset: int | None = None


def require_text(message: Message, number: int) -> None:
    """Raise InvalidConversation if a question or an answer is empty.

    number: the turn's number in its conversation, from 1.
    """
    role = message["role"]
    content = message["content"]
    if (
        role in ("user", "assistant")
        and (not content or content.isspace())
        and CALLS not in message
    ):
        raise InvalidConversation(
            "empty answer" if role == "assistant" else "empty turn",
            f"turn {number} ({role}) has no text",
        )


def parse_arguments(arguments: Any) -> dict[str, Any] | None:
    """Return the object in the arguments of a call, given as an object or as JSON text.

    Returns {} for a call without arguments (absent, null or blank), and None if the arguments are
    anything but an object, such as text that is cut or was encoded twice.
    """
    if isinstance(arguments, str):
        try:
            value = (
                json.loads(arguments, parse_constant=_refuse_constant) if arguments.strip() else {}
            )
            if "\\u" in arguments:  # an escape may spell half a character
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return None
        arguments = value
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else None


def require_arguments(arguments: Any, where: str) -> None:
    """Raise InvalidConversation if the arguments of a call contain no object.

    where: the turn, for the error message.
    """
    if parse_arguments(arguments) is None:
        raise InvalidConversation(
            "arguments",
            f"the arguments of a function call of {where} are not a JSON object: {arguments!r:.80}",
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def require_order(roles: Sequence[str]) -> None:
    """Raise InvalidConversation if the order of the roles is not one that templates expect.

    roles: values from ROLES.
    """
    if problem := _find_disorder(tuple(roles)):
        raise InvalidConversation(*problem)


@lru_cache(maxsize=4096)
def _find_disorder(roles: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the kind and message of the first error in the order of roles, None if it is right."""
    for number, (before, role) in enumerate(zip(("", *roles), roles, strict=False), 1):
        if before not in _FOLLOWS[role]:
            return "roles out of order", f"turn {number} ({role}) follows {before or 'nothing'}"
    if "assistant" not in roles:
        problem = (
            f"the only role is {roles[0]}"
            if len(set(roles)) == 1
            else f"the roles are {', '.join(dict.fromkeys(roles))}"
        )
        return "no assistant turn", problem if roles else "there is no turn"
    return None
