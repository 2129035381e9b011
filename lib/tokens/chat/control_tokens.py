"""Find control tokens: only a template may write them, and messages must not contain them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.core.conversation import Conversation
from lib.tokens.chat.policy import ASSISTANT


class ControlToken(Exception):
    """Raised if a message contains a control token."""


class ControlTokens:
    """Finds control tokens in conversations.

    in_answers: tokens that answers must not contain. elsewhere: tokens that other texts must not.
    """

    def __init__(self, in_answers: Iterable[str], elsewhere: Iterable[str]) -> None:
        self._control = {True: _compile_patterns(in_answers), False: _compile_patterns(elsewhere)}

    def are_plain(self, conversations: Sequence[Conversation]) -> bool:
        """Return whether no conversation contains a control token, with one search for all."""
        texts: list[str] = []
        for messages, tools, _ in conversations:
            for message in messages:
                if len(message) == 2:  # role and content
                    texts.append(message.get("content") or "")
                else:
                    texts += _list_strings(message)
            if tools:
                texts += _list_strings(tools)
        joined = "\0".join(texts)
        return not any(pattern.search(joined) for pattern in self._control[False])

    def require_plain(self, conversation: Conversation) -> None:
        """Raise ControlToken if a message or a tool contains a control token."""
        turns = [
            (
                f"turn {number} ({message['role']})",
                message["role"] == ASSISTANT,
                [value for key, value in message.items() if key != "role"],
            )
            for number, message in enumerate(conversation.messages, 1)
        ]
        for what, is_answer, value in [*turns, ("a tool", False, conversation.tools)]:
            for text in _list_strings(value):
                for pattern in self._control[is_answer]:
                    if match := pattern.search(text):
                        token = match[0].encode("utf-8", "backslashreplace").decode()
                        raise ControlToken(f"{what} spells the token {token}")


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


def _list_strings(value: Any) -> list[str]:
    """Return the strings in nested values."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return (
        [text for each in value for text in _list_strings(each)]
        if isinstance(value, (list, tuple))
        else []
    )
