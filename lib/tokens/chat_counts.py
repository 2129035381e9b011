"""What became of a dataset's conversations: counted in the preparation, kept with the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class ChatCounts:
    """Counts the conversations of a split, and the samples that came of them.

    dropped: by cause. stops: by token id, samples whose last trained token is that special token.
    """

    conversations: int = 0
    turns: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stops: Counter[int] = field(default_factory=Counter)

    @property
    def trained_share(self) -> float:
        """Return the share of the tokens that are trained."""
        return self.trained / max(1, self.tokens)

    @property
    def ended_share(self) -> float:
        """Return the share of the samples that end in a stop token."""
        return self.stops.total() / max(1, self.samples)

    def add(self, other: ChatCounts) -> None:
        """Add what another part of the dataset counted."""
        for name in ("conversations", "turns", "samples", "tokens", "trained", "dropped", "stops"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**vars(self), "dropped": dict(self.dropped),
                "stops": {str(token): count for token, count in self.stops.items()}}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ChatCounts:
        """Return it from JSON; TypeError or ValueError where that is not what `record` gives."""
        stops = {int(token): count for token, count in record["stops"].items()}
        made = cls(**{**record, "dropped": Counter(record["dropped"]), "stops": Counter(stops)})
        counts = [made.conversations, made.turns, made.samples, made.tokens, made.trained,
                  *made.dropped.values(), *made.stops.values()]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("a count that is none")
        return made


class ChatFacts(NamedTuple):
    """Says what chat datasets were prepared with, and what came of them.

    template: in Jinja. stops: the token ids that end samples, the most frequent one first.
    counts: by split.
    """

    template: str
    stops: list[int]
    counts: dict[str, ChatCounts]


def facts(template: str, counts: Iterable[Mapping[str, ChatCounts]]) -> ChatFacts:
    """Return the facts of one or several datasets that share a template; counts: of each."""
    sums: dict[str, ChatCounts] = {}
    for of_dataset in counts:
        for name, count in of_dataset.items():
            sums.setdefault(name, ChatCounts()).add(count)
    stops = sum((count.stops for count in sums.values()), Counter())
    return ChatFacts(template, [token for token, _ in stops.most_common()], sums)
