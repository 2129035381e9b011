"""Functions that an assistant may call, and its calls, in the one row_options that templates know.

    tools       [{"type": "function", "function": {"name": …, "parameters": …}}]
    tool_calls  [{"type": "function", "function": {"name": …, "arguments": {…}}}]

Arguments that are JSON in a text, as OpenAI has them, become the object that the text holds.
"""

from __future__ import annotations

from typing import Any

from lib.core.conversation import Refused
from lib.corpus import json_data

_OUTER = ("type", "id")  # what stands beside a function, and not in it
Functions = list[dict[str, Any]]


def describe_type(value: Any) -> str:
    """Return what a value is, in words."""
    for kind, words in (
        (type(None), "nothing"),
        (bool, "true or false"),
        ((int, float), "a number"),
        (str, "a text"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, kind):
            return words
    return f"a value of the type {type(value).__name__}"


def parse_json_text(text: str, what: str) -> Any:
    """Return the JSON of a text; Refused, naming `what`, where it is none."""
    try:
        return json_data.load_json(text)
    except (ValueError, RecursionError):
        raise Refused("content", f"{what} is a text that is not JSON") from None


def list_tools(tools: Any) -> Functions | None:
    """Return the functions of a conversation, None where there are none."""
    if isinstance(tools, str):
        tools = parse_json_text(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("content", f"tools is {describe_type(tools)}, and not a list of objects")
    return [_wrap_function(tool) if "name" in tool else tool for tool in tools]


def list_calls(calls: Any, where: str) -> Functions:
    """Return the calls of a turn: one or a list of them, perhaps as JSON in a text."""
    if isinstance(calls, str):
        calls = parse_json_text(calls, f"the function call of {where}")
    return [
        _normalize_call(call, where) for call in (calls if isinstance(calls, list) else [calls])
    ]


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    whole = _wrap_function(call) if isinstance(call, dict) else {}
    function = whole.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("content", f"a function call of {where} names no function")
    if isinstance(whole.get("id"), int):
        whole["id"] = str(whole["id"])  # as in the turn that answers it
    return {
        **whole,
        "function": {**function, "arguments": _parse_arguments(function.get("arguments"))},
    }


def _wrap_function(given: dict[str, Any]) -> dict[str, Any]:
    """Return a function or a call with its type, and with name and the like one level deeper."""
    if "function" in given:
        return {"type": "function", **given}
    outer = {key: given[key] for key in _OUTER if key in given}
    return {
        "type": "function",
        **outer,
        "function": {key: value for key, value in given.items() if key not in _OUTER},
    }


def _parse_arguments(given: Any) -> Any:
    """Return arguments as an object where they are one; another text stays as it is."""
    if not given:
        return {}
    if isinstance(given, str):
        try:
            found = json_data.load_json(given)
        except (ValueError, RecursionError):
            return given
        return found if isinstance(found, dict) else given
    return given
