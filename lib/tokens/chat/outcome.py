"""What became of a dataset's conversations: counted in the preparation, kept with the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lib.core import units

_NAMED = 4  # stop tokens, at most


@dataclass
class ChatCounts:
    """Counts the conversations of a split, and the samples that came of them.

    dropped: by cause. stops: by token id, samples whose last trained token is that special token.
    first: by cause, what is said of the first conversation that was dropped. unprompted: samples
    that are trained from their second token on, so that nothing of them is a prompt. left_out: what
    the template does not write, by what it is.
    """

    conversations: int = 0
    turns: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    unprompted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stops: Counter[int] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

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
        for name in vars(self).keys() - {"first"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = {**other.first, **self.first}

    def causes(self) -> str:
        """Return how many conversations were dropped by which cause; empty where none was."""
        return ", ".join(f"{count:,} {cause}" for cause, count in self.dropped.most_common())

    def rows(self, names: Mapping[int, str]) -> dict[str, str]:
        """Return it in words, a line for each thing that it tells; names: of tokens."""
        ends = ", ".join(
            f"{names[token]} {100 * count / max(1, self.samples):.3g} %"
            for token, count in self.stops.most_common(_NAMED)
        )
        causes = self.causes()
        rows = {
            "conversations": f"{self.conversations:,} with {units.counted(self.turns, 'turn')}",
            "samples": f"{self.samples:,}, {100 * self.ended_share:.3g} % of them end in a stop "
            f"token{f' ({ends})' if ends else ''}",
            "tokens": f"{self.tokens:,}, {self.trained:,} of them trained "
            f"({100 * self.trained_share:.3g} %)",
        }
        left_out = ", ".join(f"{count:,} × {what}" for what, count in self.left_out.most_common())
        return (
            rows
            | ({"dropped": causes} if causes else {})
            | ({"not written": f"{left_out}, by this template"} if left_out else {})
        )

    def record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            **vars(self),
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "stops": {str(token): count for token, count in self.stops.items()},
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ChatCounts:
        """Return it from JSON; TypeError or ValueError where that is not what `record` gives."""
        stops = {int(token): count for token, count in record["stops"].items()}
        made = cls(
            **{
                **record,
                "dropped": Counter(record["dropped"]),
                "stops": Counter(stops),
                "left_out": Counter(record["left_out"]),
            }
        )
        counts = [
            count
            for name, count in vars(made).items()
            if name not in ("dropped", "stops", "left_out", "first")
        ]
        counts += [*made.dropped.values(), *made.stops.values(), *made.left_out.values()]
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(
            made.first, dict
        ):
            raise ValueError("a count that is none")
        return made


class ChatFacts(NamedTuple):
    """Says what chat datasets were prepared with, and what came of them.

    template: in Jinja. stops: the token ids that end samples, the most frequent one first; names:
    of these. counts: by split.
    """

    template: str
    stops: list[int]
    counts: dict[str, ChatCounts]
    names: dict[int, str]

    def rows(self) -> dict[str, str]:
        """Return the report of the preparation, a line for each thing that it tells."""
        rows: dict[str, str] = {}
        for name, counts in self.counts.items():
            prefix = "" if len(self.counts) == 1 else f"{name}: "
            rows |= {prefix + key: text for key, text in counts.rows(self.names).items()}
        return rows


def facts(every: Sequence[ChatFacts]) -> ChatFacts | None:
    """Return the facts of several datasets that share a template as one; None of none."""
    sums: dict[str, ChatCounts] = {}
    names: dict[int, str] = {}
    for each in every:
        names |= each.names
        for split, counts in each.counts.items():
            sums.setdefault(split, ChatCounts()).add(counts)
    return made(every[0].template, sums, names) if every else None


def made(template: str, counts: dict[str, ChatCounts], names: dict[int, str]) -> ChatFacts:
    """Return the facts of a dataset; names: of tokens, those that end samples at least."""
    stops = sum((each.stops for each in counts.values()), Counter[int]())
    in_order = [token for token, _ in stops.most_common()]
    return ChatFacts(template, in_order, counts, {token: names[token] for token in in_order})
