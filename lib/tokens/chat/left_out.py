"""What a template does not write of a conversation: refused where silence would be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.core.conversation import CALLS, Message
from lib.tokens.chat.sandbox import TemplateError


def require_tools(tools: Sequence[Message] | None, text: str) -> None:
    """Raise TemplateError where a template leaves out functions that may be called."""
    for tool in tools or ():
        if _name_of(tool) not in text:
            raise TemplateError(f"it leaves out the tool {_name_of(tool)}")


def require_calls(message: Message, number: int, text: str) -> None:
    """Raise TemplateError where a template leaves out calls: silence would be learned instead."""
    for call in message.get(CALLS) or ():
        if _name_of(call) not in text:
            raise TemplateError(f"it leaves out the call of {_name_of(call)} in turn {number}")


def _name_of(described: Any) -> str:
    """Return the name of a function that a tool or a call describes, "" where it is not known."""
    function = described.get("function", described) if isinstance(described, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def is_lost(message: Message, text: str) -> bool:
    """Tell whether a system prompt is nowhere in a text."""
    return (
        message["role"] in ("system", "developer")
        and (message.get("content") or "").strip() not in text
    )


def are_thoughts_lost(message: Message, text: str) -> bool:
    """Tell whether the thoughts of an answer are nowhere in a text."""
    return (message.get("reasoning_content") or "").strip() not in text
