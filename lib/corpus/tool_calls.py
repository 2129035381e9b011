"""Normalize tools and tool calls to the form that chat templates expect.

    tools       [{"type": "function", "function": {"name": …, "parameters": …}}]
    tool_calls  [{"type": "function", "function": {"name": …, "arguments": {…}}}]

Arguments that are JSON text, as in OpenAI's format, stay as they are, so that numbers such as 1.50
keep their form. Stage 04 gives each template the form that it takes.
"""

from __future__ import annotations

from typing import Any

from lib.core.conversation import InvalidConversation, parse_arguments, require_arguments
from lib.corpus import json_data

_OUTER = ("type", "id")  # keys beside `function`, not inside it
Functions = list[dict[str, Any]]


def describe_type(value: Any) -> str:
    """Return the type of a JSON value as a noun phrase for messages."""
    for kind, words in (
        (type(None), "null"),
        (bool, "a boolean"),
        ((int, float), "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, kind):
            return words
    return f"a value of the type {type(value).__name__}"


def parse_json_text(text: str, name: str) -> Any:
    """Return the value of a string of JSON.

    name: the name of the value in errors. Raises InvalidConversation if the string is not JSON.
    """
    try:
        return json_data.load_json(text)
    except (ValueError, RecursionError):
        raise InvalidConversation("content", f"{name} is a string that is not JSON") from None


def list_tools(tools: Any) -> Functions | None:
    """Return the tools of a conversation, None if it has none."""
    if isinstance(tools, str):
        tools = parse_json_text(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidConversation(
            "content", f"tools is {describe_type(tools)}, expected a list of objects"
        )
    return [_wrap_function(tool) if "name" in tool else tool for tool in tools]


def list_calls(calls: Any, where: str) -> Functions:
    """Return the calls of a turn, given as one call, a list, or a string of JSON.

    where: the turn, for error messages.
    """
    if isinstance(calls, str):
        calls = parse_json_text(calls, f"the function call of {where}")
    return [
        _normalize_call(call, where) for call in (calls if isinstance(calls, list) else [calls])
    ]


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    wrapped = _wrap_function(call) if isinstance(call, dict) else {}
    function = wrapped.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidConversation("content", f"a function call of {where} names no function")
    if isinstance(wrapped.get("id"), int):
        # tool_call_id of the answer becomes a string, too
        wrapped = {**wrapped, "id": str(wrapped["id"])}
    arguments = function.get("arguments")
    require_arguments(arguments, where)
    return {
        **wrapped,
        "function": {**function, "arguments": arguments if parse_arguments(arguments) else {}},
    }


def _wrap_function(described: dict[str, Any]) -> dict[str, Any]:
    """Return a tool or a call with a `type`, and with its other keys under `function`."""
    if "function" in described:
        return described if "type" in described else {"type": "function", **described}
    outer = {key: described[key] for key in _OUTER if key in described}
    return {
        "type": "function",
        **outer,
        "function": {key: value for key, value in described.items() if key not in _OUTER},
    }
