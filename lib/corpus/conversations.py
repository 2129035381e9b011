"""Conversations out of the shapes in which people keep them.

    messages       [{role, content, tool_calls, …}], with `tools`; a `weight` each, or `weights`
    prompt         and completion: a text each, or a list of messages each
    conversations  [{from, value}], as ShareGPT has them, with `system` and `tools`
    alpaca         instruction, input, output, with `system` and `history`

All become messages with the roles of today's chat templates. What does not fit is refused by kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lib.core.conversation import Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
            "bard": "assistant", "model": "assistant", "observation": "tool", "function": "tool",
            "function_response": "tool", "function_call": "assistant"} | {r: r for r in ROLES}
# What may stand before a turn; "" is the beginning.
_FOLLOWS = {"user": ("", "system", "developer", "assistant", "tool"),
            "assistant": ("user", "tool"), "tool": ("assistant", "tool"),
            "system": ("",), "developer": ("", "system")}
_KEPT = ("reasoning_content", "thinking", "reasoning", "name", "tool_call_id")

Messages = list[dict[str, Any]]


class Refused(Exception):
    """Says why a record is no conversation. kind: as errors.jsonl names it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def shape_of(record: Any) -> str:
    """Return which of the shapes a record has, "" for none."""
    if not isinstance(record, Mapping):
        return ""
    return next((name for name, (keys, _) in _SHAPES.items() if keys <= record.keys()), "")


def read(record: Any) -> Conversation:
    """Return the conversation of a record; Refused where it is none."""
    shape = shape_of(record)
    if not shape:
        keys = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise Refused("no conversation", f"none of {', '.join(_SHAPES)} in it ({keys})")
    messages = _SHAPES[shape][1](record)
    _require_order(messages)
    return Conversation(messages, _tools(record.get("tools")), _weights(record, messages))


def _of_messages(record: Mapping[str, Any]) -> Messages:
    return _turns(record["messages"])


def _of_prompt(record: Mapping[str, Any]) -> Messages:
    parts: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        part = record[key]
        parts += [{"role": role, "content": part}] if isinstance(part, str) else _list(part, key)
    return _turns(parts)


def _of_sharegpt(record: Mapping[str, Any]) -> Messages:
    turns = [{**turn, "role": turn.get("from"), "content": turn.get("value")}
             if isinstance(turn, Mapping) and "from" in turn else turn
             for turn in _list(record["conversations"], "conversations")]
    return _turns([*_system(record), *turns])


def _of_alpaca(record: Mapping[str, Any]) -> Messages:
    turns = _system(record)
    for pair in record.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise Refused("no conversation", "history is not made of pairs")
        turns += [{"role": role, "content": text}
                  for role, text in zip(("user", "assistant"), pair, strict=True)]
    asked = [part for part in (record["instruction"], record.get("input")) if part]
    if not all(isinstance(part, str) for part in asked):
        raise Refused("content", "instruction and input are not texts")
    return _turns([*turns, {"role": "user", "content": "\n\n".join(asked)},
                   {"role": "assistant", "content": record["output"]}])


_SHAPES: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], Messages]]] = {
    "messages": (frozenset(["messages"]), _of_messages),
    "conversations": (frozenset(["conversations"]), _of_sharegpt),
    "prompt": (frozenset(["prompt", "completion"]), _of_prompt),
    "alpaca": (frozenset(["instruction", "output"]), _of_alpaca)}


def _system(record: Mapping[str, Any]) -> Messages:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("no conversation", f"{name} is no list of turns")
    return value


def _turns(turns: Any) -> Messages:
    return [_turn(turn, number) for number, turn in enumerate(_list(turns, "messages"), 1)]


def _turn(turn: Any, number: int) -> dict[str, Any]:
    """Return a message with the role and the fields that templates know."""
    if not isinstance(turn, Mapping):
        raise Refused("no conversation", f"turn {number} is no object with a role and a content")
    named = turn.get("role")
    role = _ROLE_OF.get(named) if isinstance(named, str) else None
    if role is None:
        raise Refused("unknown role", f"turn {number} has the role {named!r}; known are "
                                      f"{', '.join(_ROLE_OF)}")
    content, calls = _text(turn.get("content"), number), turn.get("tool_calls")
    if named == "function_call":  # ShareGPT's: the content is the call
        content, calls = "", [_call(content, number)]
    if isinstance(calls, str):
        calls = _json(calls, f"the tool_calls of turn {number}")
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {key: turn[key] for key in _KEPT if isinstance(turn.get(key), str)}
    if calls:
        message["tool_calls"] = calls
    if not content.strip() and not calls and role in ("user", "assistant"):
        kind = "empty answer" if role == "assistant" else "empty turn"
        raise Refused(kind, f"turn {number} ({role}) has no text")
    return message


def _text(content: Any, number: int) -> str:
    """Return the text of a content: itself, or its parts of text one after the other."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str)
            and part.get("type", "text") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise Refused("content", f"the content of turn {number} is not text alone")


def _call(text: str, number: int) -> dict[str, Any]:
    call = _json(text, f"the function call of turn {number}")
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise Refused("content", f"the function call of turn {number} names no function")
    return {"type": "function", "function": {"name": call["name"],
                                             "arguments": call.get("arguments", {})}}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("content", f"{what} is not JSON") from None


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools in (None, [], {}):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Refused("content", "tools is no list of JSON schemas")
    return tools


def _weights(record: Mapping[str, Any], messages: Messages) -> list[float] | None:
    """Return the weight of each message: 0 is not trained."""
    given: Iterable[Any] | None = record.get("weights")
    turns = record.get("messages") or record.get("conversations") or ()
    if given is None and any(isinstance(turn, Mapping) and turn.get("weight") is not None
                             for turn in turns):
        before = len(messages) - len(turns)  # a system message that stood apart
        given = [1] * before + [1 if turn.get("weight") is None else turn["weight"]
                                for turn in turns]
    if given is None:
        return None
    weights = list(given)
    if len(weights) != len(messages) or any(weight not in (0, 1) for weight in weights):
        raise Refused("weights", "weights are not a 0 or a 1 for each turn")
    return [float(weight) for weight in weights]


def _require_order(messages: Messages) -> None:
    before = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if before not in _FOLLOWS[role]:
            raise Refused("roles out of order", f"turn {number} ({role}) follows "
                                                f"{before or 'nothing'}")
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise Refused("no assistant turn", f"{len(messages)} turns, and none of an assistant")
