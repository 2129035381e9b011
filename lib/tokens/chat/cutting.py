"""Split a conversation that is longer than a sample, before a question.

Each part begins with the system prompt (and the tools) and ends with a trained answer. A part
trains only the answers in it, so each answer is trained once.
"""

from __future__ import annotations

from collections.abc import Callable

from lib.core.conversation import Conversation
from lib.tokens.chat.boundaries import EncodedTexts

EncodePart = Callable[[Conversation], EncodedTexts | None]  # None: the part does not fit


def split_conversation(
    conversation: Conversation, encode: EncodePart, share: float, last: bool
) -> tuple[list[EncodedTexts], int]:
    """Return the parts that fit, and the number of trained answers that are in no part.

    share: the fraction of the conversation that fits a sample, about. last: train only the last
    answer, so return one part with the last turns.
    """
    cut = _Groups(conversation)
    if last:
        return _take_last_turns(cut, encode, share)
    parts = []
    lost = 0
    first = 0
    count = len(cut.starts) - 1
    budget = share * cut.size(0, count)
    while first < count:
        end = first + 1
        while end < count and cut.size(first, end + 1) <= budget:
            end += 1
        encoded = encode(cut.part(first, end))
        while encoded is None and end > first + 1:
            end -= 1
            encoded = encode(cut.part(first, end))
        if encoded is None:
            encoded, missed = _shorten_group(cut, first, encode)
            lost += missed
        if encoded is not None and len(encoded.ids):
            parts.append(encoded)
        first = end
    return parts, lost


def _take_last_turns(
    cut: _Groups, encode: EncodePart, share: float
) -> tuple[list[EncodedTexts], int]:
    """Return as many of the last turns as fit, and the number of lost answers."""
    count = len(cut.starts) - 1
    budget = share * cut.size(0, count)
    first = next((n for n in range(count) if cut.size(n, count) <= budget), count - 1)
    for start in range(first, count):
        encoded = encode(cut.part(start, count))
        if encoded is not None:
            return ([encoded] if len(encoded.ids) else []), 0
    return [], 1


def _shorten_group(cut: _Groups, group: int, encode: EncodePart) -> tuple[EncodedTexts | None, int]:
    """Return the turns of one question up to the last answer that fits, and the lost answers."""
    answers = cut.trained(group)
    for kept in range(len(answers) - 1, 0, -1):
        encoded = encode(cut.part(group, group + 1, answers[kept - 1] + 1))
        if encoded is not None:
            return encoded, len(answers) - kept
    return None, len(answers)


class _Groups:
    """Divides a conversation into groups: a question and the turns up to the next question.

    starts: the number of each group's first message, then the number of messages.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._messages, self._tools, weights = conversation
        self._weights = weights or [1.0] * len(self._messages)
        roles = [message["role"] for message in self._messages]
        self._head = next(
            (i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles)
        )
        questions = [i for i in range(self._head, len(roles)) if roles[i] == "user"]
        self.starts = [self._head, *(i for i in questions if i > self._head), len(roles)]
        self._sizes = [len(str(message)) for message in self._messages]

    def size(self, first: int, end: int) -> int:
        """Return the approximate length of groups [first, end), with the system prompt."""
        return sum(self._sizes[: self._head]) + sum(
            self._sizes[self.starts[first] : self.starts[end]]
        )

    def trained(self, group: int) -> list[int]:
        """Return the numbers of the trained messages in a group."""
        return [
            i
            for i in range(self.starts[group], self.starts[group + 1])
            if self._messages[i]["role"] == "assistant" and self._weights[i]
        ]

    def part(self, first: int, end: int, until: int | None = None) -> Conversation:
        """Return groups [first, end) as a conversation.

        until: stop before this message instead of at the end of the groups.
        """
        stop = self.starts[end] if until is None else until
        places = [*range(self._head), *range(self.starts[first], stop)]
        return Conversation(
            [self._messages[i] for i in places], self._tools, [self._weights[i] for i in places]
        )
