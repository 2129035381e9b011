"""Tokens that control the model: a template writes them, and messages must not contain them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.core.conversation import Conversation
from lib.tokens.chat.policy import ASSISTANT


class ControlToken(Exception):
    """Says that a message contains a token that controls the model."""


class ControlTokens:
    """Finds control tokens in conversations.

    in_answers: tokens that an answer must not contain. elsewhere: the same for all other texts.
    """

    def __init__(self, in_answers: Iterable[str], elsewhere: Iterable[str]) -> None:
        self._control = {True: _finders(in_answers), False: _finders(elsewhere)}

    def are_plain(self, conversations: Sequence[Conversation]) -> bool:
        """Return whether no conversation contains a control token: one search for many."""
        texts: list[str] = []
        for messages, tools, _ in conversations:
            for message in messages:
                if len(message) == 2:  # role and content
                    texts.append(message.get("content") or "")
                else:
                    texts += _strings(message)
            if tools:
                texts += _strings(tools)
        joined = "\0".join(texts)
        return not any(finder.search(joined) for finder in self._control[False])

    def require_plain(self, conversation: Conversation) -> None:
        """Raise ControlToken if a message or tool contains a token that only a template writes."""
        said = [
            (
                f"turn {number} ({message['role']})",
                message["role"] == ASSISTANT,
                [value for key, value in message.items() if key != "role"],
            )
            for number, message in enumerate(conversation.messages, 1)
        ]
        for what, is_answer, value in [*said, ("a tool", False, conversation.tools)]:
            for text in _strings(value):
                for finder in self._control[is_answer]:
                    if found := finder.search(text):
                        token = found[0].encode("utf-8", "backslashreplace").decode()
                        raise ControlToken(f"{what} spells the token {token}")


def alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return what finds the longest of some texts wherever one stands."""
    longest_first = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _finders(tokens: Iterable[str]) -> list[re.Pattern[str]]:
    """Return what finds texts, one pattern per first letter: those are searched for fastest."""
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token)
    return [alternatives(several) for several in by_first.values()]


def _strings(value: Any) -> list[str]:
    """Return the strings in nested values."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return (
        [text for each in value for text in _strings(each)]
        if isinstance(value, (list, tuple))
        else []
    )
