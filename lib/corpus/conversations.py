"""Parse the conversation formats that are in common use.

    messages       [{role, content, tool_calls, …}], with `tools`; `weight` per turn, or `weights`
    conversations  [{from, value}], the format of ShareGPT
    prompt         with `completion`: a text each, or a list of messages each
    alpaca         instruction, input, output, with `history`

A record of any format may contain a `system` prompt, `tools`, and `chat_template_kwargs` for the
chat template. Every conversation becomes a list
of messages with the roles that chat templates know. Other records are refused; KINDS lists the
reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lib.core.conversation import (
    CALLS,
    RESERVED_KWARGS,
    ROLES,
    TEMPLATE_KWARGS,
    Conversation,
    InvalidConversation,
    Message,
    require_order,
    require_text,
)
from lib.corpus import tool_calls, turn_keys
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
    weights = _read_record_weights(record)
    tools = record.get("tools") or record.get("functions")
    return Conversation(
        messages,
        tool_calls.list_tools(tools) if tools else None,
        None if are_plain and weights is None else _list_weights(weights, turns),
        _read_template_kwargs(record),
    )


def list_unused_keys(record: Record, name: str) -> list[str]:
    """Return the keys that are not used, for a valid record of the format `name`.

    They are given as `record: KEY`, `turn: KEY` or `part: KEY`, once for each place.
    """
    used = _COMMON_KEYS.union(_FORMATS[name].keys)
    if name == "alpaca":
        used |= _ALPACA_KEYS
    unused = [
        f"record: {key}"
        for key, value in record.items()
        if key not in used and value not in (None, "", [], {})
    ]
    return unused + list(turn_keys.list_unused(_FORMATS[name].turns(record)))


def is_wanted(key: str) -> bool:
    """Return whether the value of a record's key decides what is trained."""
    return key in KEYS or turn_keys.may_be_mark(key)


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
_ALPACA_KEYS = {"input", "history"}
_COMMON_KEYS = (
    frozenset({"system", "tools", "functions", "documents", TEMPLATE_KWARGS})
    | turn_keys.TRAINED
    | turn_keys.EXCLUDED
)
# All keys of a record that this module reads.
KEYS = frozenset(key for keys, _ in _FORMATS.values() for key in keys) | _ALPACA_KEYS | _COMMON_KEYS


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
        turn_keys.require_parts_trained(content, f"turn {number}")
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


def _read_record_weights(record: Record) -> Any:
    """Return the weights of a record's turns as given, None without any.

    Raises InvalidConversation if a mark of the record excludes it as a whole, or has an unknown
    meaning.
    """
    names = [
        key for key in record if key not in ("weights", "source") and _is_record_mark(record, key)
    ]
    lists = [key for key in names if key in turn_keys.TRAINED and isinstance(record[key], list)]
    marks = {key: record[key] for key in names if key not in lists}
    if turn_keys.read_weight(marks, "the record") == 0:
        raise InvalidConversation(
            "weights", f"the record must not be trained: {', '.join(marks)} excludes it"
        )
    values = [record[key] for key in ("weights", *lists) if record.get(key) is not None]
    if len(values) > 1:
        raise InvalidConversation(
            "weights", f"there are several lists of weights: {', '.join(lists)}"
        )
    return next(iter(values), None)


def _is_record_mark(record: Record, key: str) -> bool:
    """Return whether a key of a record is a mark, and not a text about the record."""
    value = record[key]
    if key == "mask" and isinstance(value, str):  # NeMo: the role whose turns are not trained
        return ROLE_OF.get(value.lower(), "user") == "assistant"
    return not (isinstance(value, str) and key not in turn_keys.TRAINED) and turn_keys.may_be_mark(
        key
    )


def _list_weights(weights: Any, turns: Sequence[Record]) -> list[float] | None:
    """Return the weight of each turn (0: not trained on, 1: trained on), None if no turn has one.

    weights: the weights of the record. A separate system prompt needs no weight. A turn's own mark
    against training counts beside them.
    """
    marks = [turn_keys.read_weight(turn, f"turn {i}") for i, turn in enumerate(turns, 1)]
    if weights is None:
        if all(mark is None for mark in marks):
            return None
        weights = [1] * len(turns)
    if isinstance(weights, str):
        weights = tool_calls.parse_json_text(weights, "weights")
    if not isinstance(weights, list) or not all(
        isinstance(weight, (int, float)) and weight in (0, 1) for weight in weights
    ):
        raise InvalidConversation("weights", "a weight is not 0 or 1")
    if len(weights) == len(turns) - 1 and _get_role_name(turns[0]) == "system":
        weights = [1, *weights]
    if len(weights) != len(turns):
        raise InvalidConversation("weights", f"found {len(weights)} weights for {len(turns)} turns")
    return [
        float(weight) if mark is None else min(float(weight), mark)
        for weight, mark in zip(weights, marks, strict=True)
    ]


def _read_template_kwargs(record: Record) -> dict[str, Any] | None:
    """Return what a record passes to the chat template, None without anything."""
    variables = record.get(TEMPLATE_KWARGS)
    if isinstance(variables, str):
        variables = (
            tool_calls.parse_json_text(variables, TEMPLATE_KWARGS) if variables.strip() else None
        )
    documents = record.get("documents")
    if variables is None and not documents:
        return None
    if not isinstance(variables or {}, dict):
        raise InvalidConversation(
            "content", f"{TEMPLATE_KWARGS} is {describe_type(variables)}, expected an object"
        )
    kwargs = {key: value for key, value in (variables or {}).items() if value is not None}
    if isinstance(documents, list) and all(isinstance(one, dict) for one in documents):
        kwargs = {"documents": documents, **kwargs}
    if taken := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise InvalidConversation(
            "content", f"{TEMPLATE_KWARGS} contains {', '.join(taken)}, which the conversation sets"
        )
    return kwargs or None
