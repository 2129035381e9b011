"""Parse the conversation formats that are in common use.

    messages       [{role, content, tool_calls, …}], with `tools`; `weight` per turn, or `weights`
    conversations  [{from, value}], the format of ShareGPT
    prompt         with `completion`: a text each, or a list of messages each
    alpaca         instruction, input, output, with `history`

A record of any format may contain a `system` prompt and `tools`. Every conversation becomes a list
of messages with the roles that chat templates know. Other records are refused; KINDS lists the
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lib.core.conversation import (
    CALLS,
    ROLES,
    Conversation,
    InvalidConversation,
    Message,
    require_order,
    require_text,
)
from lib.corpus import tool_calls
from lib.corpus.tool_calls import describe_type

ROLE_OF = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
} | {role: role for role in ROLES}
_PLAIN_ROLE_OF = {name: role for name, role in ROLE_OF.items() if name != "function_call"}
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_COPIED = ("name", "tool_call_id")
_WEIGHTS = ("weight", "train", "training")
# Kinds of problems in errors.jsonl for refused records.
KINDS = (
    "empty answer",
    "empty turn",
    "unknown role",
    "no assistant turn",
    "roles out of order",
    "content",
    "arguments",
    "weights",
    "no conversation",
)
_MOST_KEYS = 8  # keys of a record that a message names
_LONGEST_KEY = 40  # characters of a key in a message

Record = dict[str, Any]


def detect_format(record: Any) -> str:
    """Return the format of a record by its keys, "" if they match no format."""
    if not isinstance(record, dict):
        return ""
    for name, first, last in _SIGNS:
        if record.get(first) is not None and last in record:
            return name
    # A concatenated table has the columns of several formats; the unused ones are null.
    return next((name for name, first, last in _SIGNS if first in record and last in record), "")


def parse_record(record: Record, name: str) -> Conversation:
    """Return the conversation in a record of the format `name`.

    Raises InvalidConversation if a turn, the order of the roles, a tool or a weight is not valid.
    """
    turns = _FORMATS[name].turns(record)
    if (system := record.get("system")) and _get_role_name(turns[0] if turns else {}) != "system":
        turns = [{"role": "system", "content": system}, *turns]
    messages = []
    are_plain = True
    for number, turn in enumerate(turns, 1):
        if (message := _convert_plain_turn(turn)) is None:
            message = _convert_turn(turn, number)
            are_plain = False
        messages.append(message)
    require_order([message["role"] for message in messages])
    weights = record.get("weights")
    tools = record.get("tools") or record.get("functions")
    return Conversation(
        messages,
        tool_calls.list_tools(tools) if tools else None,
        None if are_plain and weights is None else _list_weights(weights, turns),
    )


def is_conversation(record: Record, name: str) -> bool:
    """Return whether a record of a format contains a valid conversation."""
    try:
        return bool(parse_record(record, name))
    except (InvalidConversation, RecursionError):
        return False


def describe_record(record: Any) -> str:
    """Return a short description of a record: its first keys, or its type."""
    if not isinstance(record, dict):
        return describe_type(record)
    keys = [str(key)[:_LONGEST_KEY] for key in record]
    return (
        f"an object with the keys {', '.join(keys[:_MOST_KEYS])}"
        + (", …" if len(keys) > _MOST_KEYS else "")
        if keys
        else "an object without keys"
    )


def _list_messages(record: Record) -> list[Any]:
    return _parse_list(record["messages"], "messages")


def _list_sharegpt(record: Record) -> list[Any]:
    return _parse_list(record["conversations"], "conversations")


def _list_prompt(record: Record) -> list[Any]:
    """Return the turns of a prompt and its completion; answers in the prompt are not trained on."""
    prompt = record["prompt"]
    completion = record["completion"]
    if not isinstance(prompt, list):
        turns: list[Any] = [{"role": "user", "content": prompt}]
    else:
        turns = [
            {**turn, "weight": 0}
            if isinstance(turn, dict) and ROLE_OF.get(_get_role_name(turn)) == "assistant"
            else turn
            for turn in prompt
        ]
    return turns + (
        completion
        if isinstance(completion, list)
        else [{"role": "assistant", "content": completion}]
    )


def _list_alpaca(record: Record) -> list[Any]:
    turns: list[Any] = []
    history = record.get("history")
    for pair in _parse_list(history, "history") if history else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise InvalidConversation(
                "no conversation", "history is not a list of [question, answer] pairs"
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    questions = [part for part in (record["instruction"], record.get("input")) if part]
    for part in questions:
        if not isinstance(part, str):
            raise InvalidConversation(
                "content", f"instruction or input is {describe_type(part)}, expected a string"
            )
    return [
        *turns,
        {"role": "user", "content": "\n\n".join(questions)},
        {"role": "assistant", "content": record["output"]},
    ]


class _Format(NamedTuple):
    """Describes a format: the keys of its records, and the function that lists a record's turns."""

    keys: tuple[str, ...]
    turns: Callable[[Record], list[Any]]


_FORMATS = {
    "messages": _Format(("messages",), _list_messages),
    "ShareGPT conversations": _Format(("conversations",), _list_sharegpt),
    "prompt/completion": _Format(("prompt", "completion"), _list_prompt),
    "alpaca": _Format(("instruction", "output"), _list_alpaca),
}
_SIGNS = [(name, keys[0], keys[-1]) for name, (keys, _) in _FORMATS.items()]
# All keys of a record that this module reads.
KEYS = frozenset(key for keys, _ in _FORMATS.values() for key in keys) | {
    "input",
    "history",
    "system",
    "tools",
    "functions",
    "weights",
}


def _parse_list(value: Any, name: str) -> list[Any]:
    """Return a list that a record contains as a list, or as JSON text as in a cell of CSV."""
    if isinstance(value, str):
        value = tool_calls.parse_json_text(value, name)
    if not isinstance(value, list):
        raise InvalidConversation(
            "no conversation", f"{name} is {describe_type(value)}, expected a list"
        )
    return value


def _get_role_name(turn: Any) -> str:
    """Return the role name of a turn in lower case, "" if it has none."""
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return name.lower() if isinstance(name, str) else ""


def _convert_plain_turn(turn: Any) -> Message | None:
    """Return the message of a turn with only a role and a text, None for any other turn.

    Most turns are of this kind, so this is the fast path of `_convert_turn`.
    """
    if type(turn) is not dict or len(turn) != 2:
        return None
    role = turn.get("role")
    content = turn.get("content")
    if role is None:
        role = turn.get("from")
        content = turn.get("value")
    if (
        type(role) is str
        and type(content) is str
        and (known := _PLAIN_ROLE_OF.get(role))
        and content
        and not content.isspace()
    ):
        return {"role": known, "content": content}
    return None


def _convert_turn(turn: Any, number: int) -> Message:
    """Return the message of any turn, with the role and fields that chat templates know.

    number: position in the conversation, from 1.
    """
    if not isinstance(turn, dict):
        raise InvalidConversation(
            "no conversation",
            f"turn {number} is {describe_type(turn)}, expected an object with role and content",
        )
    name = _get_role_name(turn)
    role = ROLE_OF.get(name)
    if role is None:
        raise _make_role_error(turn, number)
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str):
        content = _join_parts(content, number)
    message: Message = {"role": role, "content": content}
    _add_optional_fields(message, turn, number, name == "function_call")
    require_text(message, number)
    return message


def _add_optional_fields(message: Message, turn: Record, number: int, is_call: bool) -> None:
    """Add the fields of a turn besides role and content to its message.

    is_call: the content is a function call, as in ShareGPT's `function_call` turns.
    """
    for key in _COPIED:
        if isinstance(value := turn.get(key), (str, int)):
            message[key] = str(value)  # some datasets number their calls
    if thought := next((turn[key] for key in _THOUGHTS if isinstance(turn.get(key), str)), ""):
        message["reasoning_content"] = thought
    calls = turn.get(CALLS) or turn.get("function_call")
    if is_call:
        calls = message["content"]
        message["content"] = ""
    if calls:
        message[CALLS] = tool_calls.list_calls(calls, f"turn {number}")


def _make_role_error(turn: Record, number: int) -> InvalidConversation:
    role = next((turn[key] for key in ("role", "from") if key in turn), None)
    description = (
        f"the role {role!r:.60}" if isinstance(role, str) else f"{describe_type(role)} as its role"
    )
    return InvalidConversation(
        "unknown role",
        f"turn {number} has {description}; known roles: {', '.join(ROLES)}, and aliases such as "
        "human and gpt",
    )


def _join_parts(content: Any, number: int) -> str:
    """Return the joined texts of a content that is a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") == "text"
        for part in content
    ):
        return "".join([part["text"] for part in content])
    problem = (
        "has parts that are not text"
        if isinstance(content, list)
        else f"is {describe_type(content)}"
    )
    raise InvalidConversation("content", f"the content of turn {number} {problem}")


def _list_weights(weights: Any, turns: Sequence[Record]) -> list[float] | None:
    """Return the weight of each turn (0: not trained on, 1: trained on), None if no turn has one.

    weights: the weights of the record. A separate system prompt needs no weight.
    """
    if weights is None:
        if not any(key in turn for turn in turns for key in _WEIGHTS):
            return None
        weights = [
            next((turn[key] for key in _WEIGHTS if turn.get(key) is not None), 1) for turn in turns
        ]
    if isinstance(weights, str):
        weights = tool_calls.parse_json_text(weights, "weights")
    if (
        not isinstance(weights, list)
        or any(weight not in (0, 1) for weight in weights if isinstance(weight, (int, float)))
        or not all(isinstance(weight, (int, float)) for weight in weights)
    ):
        raise InvalidConversation("weights", "a weight is not 0 or 1")
    if len(weights) == len(turns) - 1 and _get_role_name(turns[0]) == "system":
        weights = [1, *weights]
    if len(weights) != len(turns):
        raise InvalidConversation("weights", f"found {len(weights)} weights for {len(turns)} turns")
    return [float(weight) for weight in weights]
