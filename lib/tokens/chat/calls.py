"""Give function calls to a chat template in the form that it takes.

Templates differ. Some write the arguments of a call as text (`+ arguments +`), others
need an object (`arguments | tojson`, `arguments.items()`). Some take calls only in a turn without
content. Some refuse a call ID unless it has nine letters and digits, as Mistral's do. The recorded
form comes first, and no other form changes what a call means.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lib.core.conversation import CALLS, Message, parse_arguments
from lib.tokens.chat.render import LimitError, TemplateError

Render = Callable[[Sequence[Message]], str]

_ID_CHARACTERS = string.digits + string.ascii_letters
_ID_LENGTH = 9
# Arguments to try a template with. Python writes the object in another way than JSON does.
_TRIAL_KEY = "Kingfisher_7Q"
_TRIAL = {_TRIAL_KEY: "1.50"}
_TRIAL_TEXT = json.dumps(_TRIAL)


def fit_calls(messages: Sequence[Message], render: Render) -> Sequence[Message]:
    """Return the messages with their calls in a form that the template takes.

    render: returns the text that the template writes for some messages. The messages stay as they
    are if they contain no call, or if no form helps.
    """
    if not any(CALLS in message for message in messages):
        return messages
    for form in _list_forms(messages):
        takes_text = _takes_text(form, render)
        if takes_text and _are_all_texts(form):
            return form
        if _takes_object(form, render):
            return form if takes_text else _map_arguments(form, parse_arguments)
        if takes_text:
            return _map_arguments(form, _write_arguments)
    return messages


def _list_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages as recorded, then with other contents and IDs that mean the same."""
    yield from _list_contents(messages)
    yield from _list_contents(_shorten_ids(messages))


def _list_contents(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages, then without the empty contents beside calls, then with null there."""
    yield messages
    empty = [i for i, turn in enumerate(messages) if CALLS in turn and not turn.get("content")]
    contents: tuple[Message, ...] = ({}, {"content": None}) if empty else ()
    for content in contents:
        form = list(messages)
        for i in empty:
            others = {key: value for key, value in messages[i].items() if key != "content"}
            form[i] = others | content
        yield form


def _takes_text(messages: Sequence[Message], render: Render) -> bool:
    """Return whether a template writes JSON text in the place of the arguments as it is."""
    return _TRIAL_TEXT in _render_trial(messages, render, _TRIAL_TEXT)


def _takes_object(messages: Sequence[Message], render: Render) -> bool:
    """Return whether a template writes an object in the place of the arguments, and as JSON."""
    text = _render_trial(messages, render, _TRIAL)
    return _TRIAL_KEY in text and str(_TRIAL) not in text


def _render_trial(messages: Sequence[Message], render: Render, arguments: Any) -> str:
    """Return the text of messages with other arguments, "" if the template refuses it."""
    try:
        return render(_map_arguments(messages, lambda _: arguments))
    except LimitError:
        raise
    except TemplateError:
        return ""


def _map_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with changed arguments in their calls."""

    def change_call(call: dict[str, Any]) -> dict[str, Any]:
        function = _get_function(call)
        changed = {**function, "arguments": change(function.get("arguments"))}
        return {**call, "function": changed} if "function" in call else changed

    return [
        {**message, CALLS: list(map(change_call, message[CALLS]))} if CALLS in message else message
        for message in messages
    ]


def _are_all_texts(messages: Sequence[Message]) -> bool:
    """Return whether the arguments of all calls are JSON text."""
    return all(
        isinstance(_get_function(call).get("arguments"), str)
        for message in messages
        for call in message.get(CALLS) or ()
    )


def _get_function(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call.get("function", call)
    return function


def _write_arguments(arguments: Any) -> str:
    """Return arguments as JSON text."""
    if isinstance(arguments, str) and parse_arguments(arguments):
        return arguments
    return json.dumps(parse_arguments(arguments), ensure_ascii=False)


def _shorten_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with IDs of nine letters and digits, the same in call and result.

    A call without an ID gets one, and so do the results without one, in the order of the calls.
    """
    changed = []
    waiting: list[str] = []  # the IDs of calls without a result
    for number, message in enumerate(messages):
        if CALLS in message:
            calls = [
                {**call, "id": _make_id(call.get("id") or f"{number}.{index}.{call}")}
                for index, call in enumerate(message[CALLS])
            ]
            waiting = [call["id"] for call in calls]
            message = {**message, CALLS: calls}
        elif message["role"] == "tool":
            named = message.get("tool_call_id")
            identifier = _make_id(named) if named else next(iter(waiting), "")
            waiting = [other for other in waiting if other != identifier]
            if identifier:
                message = {**message, "tool_call_id": identifier}
        changed.append(message)
    return changed


def _make_id(identifier: Any) -> str:
    """Return an ID of nine letters and digits, always the same one for an ID."""
    text = str(identifier)
    if len(text) == _ID_LENGTH and text.isascii() and text.isalnum():
        return text
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    number = int.from_bytes(digest, "big")
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        digits.append(_ID_CHARACTERS[digit])
    return "".join(digits)
