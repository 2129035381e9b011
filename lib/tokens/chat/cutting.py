"""A conversation that is too long, cut between a turn's end and the next question.

Each part has the system prompt (and the tools) in front, ends in an answer that is trained, and
trains its own answers alone, so that each answer is trained once.
"""

from __future__ import annotations

from collections.abc import Callable

from lib.core.conversation import Conversation
from lib.tokens.chat.boundaries import Coded

Code = Callable[[Conversation], Coded | None]  # None: it does not fit


def split(
    conversation: Conversation, code: Code, share: float, last: bool
) -> tuple[list[Coded], int]:
    """Return the parts that fit, and how many trained answers are in none.

    share: of the conversation, about as much as fits. last: only the last answer is trained, so
    there is one part, of the last turns.
    """
    cut = _Groups(conversation)
    if last:
        return _end(cut, code, share)
    parts = []
    lost = 0
    first = 0
    count = len(cut.starts) - 1
    budget = share * cut.size(0, count)
    while first < count:
        end = first + 1
        while end < count and cut.size(first, end + 1) <= budget:
            end += 1
        found = code(cut.part(first, end))
        while found is None and end > first + 1:
            end -= 1
            found = code(cut.part(first, end))
        if found is None:
            found, missed = _shortened(cut, first, code)
            lost += missed
        if found is not None and len(found.ids):
            parts.append(found)
        first = end
    return parts, lost


def _end(cut: _Groups, code: Code, share: float) -> tuple[list[Coded], int]:
    """Return the last turns, as many as fit."""
    count = len(cut.starts) - 1
    budget = share * cut.size(0, count)
    first = next((n for n in range(count) if cut.size(n, count) <= budget), count - 1)
    for start in range(first, count):
        found = code(cut.part(start, count))
        if found is not None:
            return ([found] if len(found.ids) else []), 0
    return [], 1


def _shortened(cut: _Groups, group: int, code: Code) -> tuple[Coded | None, int]:
    """Return the start of a question's turns, up to an answer, and how many answers it lacks."""
    answers = cut.trained(group)
    for kept in range(len(answers) - 1, 0, -1):
        found = code(cut.part(group, group + 1, answers[kept - 1] + 1))
        if found is not None:
            return found, len(answers) - kept
    return None, len(answers)


class _Groups:
    """Holds a conversation in groups, each from a question up to the next.

    starts: the number of each group's first message, and behind the last.
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
        """Return about how long some groups are, with the system prompt."""
        return sum(self._sizes[: self._head]) + sum(
            self._sizes[self.starts[first] : self.starts[end]]
        )

    def trained(self, group: int) -> list[int]:
        """Return the numbers of the messages of a group that are trained."""
        return [
            i
            for i in range(self.starts[group], self.starts[group + 1])
            if self._messages[i]["role"] == "assistant" and self._weights[i]
        ]

    def part(self, first: int, end: int, until: int | None = None) -> Conversation:
        """Return the conversation of some groups. until: where it ends, else with them."""
        stop = self.starts[end] if until is None else until
        places = [*range(self._head), *range(self.starts[first], stop)]
        return Conversation(
            [self._messages[i] for i in places], self._tools, [self._weights[i] for i in places]
        )
