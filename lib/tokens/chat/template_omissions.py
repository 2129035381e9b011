"""Find the parts of a conversation that a template omits.

If tools or calls are missing, the conversation is refused: the model would learn to stay silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.core.conversation import CALLS, Message
from lib.tokens.chat.sandbox import TemplateError


def require_tools(tools: Sequence[Message] | None, text: str) -> None:
    """Raise TemplateError if the text does not name every tool."""
    for tool in tools or ():
        if _find_function_name(tool) not in text:
            raise TemplateError(f"it leaves out the tool {_find_function_name(tool)}")


def require_calls(message: Message, number: int, text: str) -> None:
    """Raise TemplateError if the text does not name every function that a message calls."""
    for call in message.get(CALLS) or ():
        if _find_function_name(call) not in text:
            raise TemplateError(
                f"it leaves out the call of {_find_function_name(call)} in turn {number}"
            )


def _find_function_name(described: Any) -> str:
    """Return the function name in a tool or a call, "" if there is none."""
    function = described.get("function", described) if isinstance(described, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def is_system_prompt_missing(message: Message, text: str) -> bool:
    """Return whether a message is a system prompt that the text does not contain."""
    return (
        message["role"] in ("system", "developer")
        and (message.get("content") or "").strip() not in text
    )


def are_thoughts_missing(message: Message, text: str) -> bool:
    """Return whether the text does not contain the thoughts of an answer."""
    return (message.get("reasoning_content") or "").strip() not in text
