"""Count conversations and the samples made from them, and store the counts with the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lib.core import units

_MOST_STOPS = 4  # stop tokens in the report


@dataclass
class ChatCounts:
    """Counts the conversations of a split and the samples made from them.

    The names of the fields are keys in the manifest. dropped: conversations by cause. stops: token
    id → samples whose last trained token is that special token. first: cause → the message for the
    first conversation dropped. unprompted: samples trained from their second token on, so they
    contain no prompt. left_out: how often the template omitted the system prompt or thoughts.
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
        """Return the fraction of the tokens that are trained."""
        return self.trained / max(1, self.tokens)

    @property
    def ended_share(self) -> float:
        """Return the fraction of the samples that end with a stop token."""
        return self.stops.total() / max(1, self.samples)

    def add(self, other: ChatCounts) -> None:
        """Add the counts of another part of the dataset."""
        for name in vars(self).keys() - {"first"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = {**other.first, **self.first}

    def describe_causes(self) -> str:
        """Return the number of dropped conversations by cause as text, "" if none was dropped."""
        return ", ".join(f"{count:,} {cause}" for cause, count in self.dropped.most_common())

    def table_rows(self, names: Mapping[int, str]) -> dict[str, str]:
        """Return the counts as rows of a printed table. names: token id → token."""
        ends = ", ".join(
            f"{names[token]} {100 * count / max(1, self.samples):.3g} %"
            for token, count in self.stops.most_common(_MOST_STOPS)
        )
        causes = self.describe_causes()
        rows = {
            "conversations": f"{self.conversations:,} with {units.counted(self.turns, 'turn')}",
            "samples": f"{self.samples:,}, {100 * self.ended_share:.3g} % end with a stop "
            f"token{f' ({ends})' if ends else ''}",
            "tokens": f"{self.tokens:,}, {self.trained:,} trained "
            f"({100 * self.trained_share:.3g} %)",
        }
        left_out = ", ".join(f"{count:,} × {what}" for what, count in self.left_out.most_common())
        return (
            rows
            | ({"dropped": causes} if causes else {})
            | ({"omitted": f"{left_out}, by this chat template"} if left_out else {})
        )

    def to_record(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            **vars(self),
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "stops": {str(token): count for token, count in self.stops.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ChatCounts:
        """Read the counts from a JSON object.

        Raises TypeError or ValueError if `to_record` cannot have written it.
        """
        stops = {int(token): count for token, count in record["stops"].items()}
        counts_read = cls(
            **{
                **record,
                "dropped": Counter(record["dropped"]),
                "stops": Counter(stops),
                "left_out": Counter(record["left_out"]),
            }
        )
        counts = [
            count
            for name, count in vars(counts_read).items()
            if name not in ("dropped", "stops", "left_out", "first")
        ]
        counts += [
            *counts_read.dropped.values(),
            *counts_read.stops.values(),
            *counts_read.left_out.values(),
        ]
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(
            counts_read.first, dict
        ):
            raise ValueError("a count is not a whole number of at least 0")
        return counts_read


class ChatFacts(NamedTuple):
    """Describes prepared chat datasets.

    template: the Jinja source. stops: the token ids that end samples, the most frequent first.
    counts: split → its counts. names: token id → token, for the stop tokens.
    """

    template: str
    stops: list[int]
    counts: dict[str, ChatCounts]
    names: dict[int, str]

    def table_rows(self) -> dict[str, str]:
        """Return the counts of all splits as rows of a printed table."""
        rows: dict[str, str] = {}
        for name, counts in self.counts.items():
            prefix = "" if len(self.counts) == 1 else f"{name}: "
            rows |= {prefix + key: text for key, text in counts.table_rows(self.names).items()}
        return rows


def merge_facts(every: Sequence[ChatFacts]) -> ChatFacts | None:
    """Merge the facts of several datasets that share a template; return None if there are none."""
    sums: dict[str, ChatCounts] = {}
    names: dict[int, str] = {}
    for each in every:
        names |= each.names
        for split, counts in each.counts.items():
            sums.setdefault(split, ChatCounts()).add(counts)
    return build_facts(every[0].template, sums, names) if every else None


def build_facts(template: str, counts: dict[str, ChatCounts], names: dict[int, str]) -> ChatFacts:
    """Return the facts of a dataset. names: token id → token, for all stop tokens at least."""
    stops = sum((each.stops for each in counts.values()), Counter[int]())
    in_order = [token for token, _ in stops.most_common()]
    return ChatFacts(template, in_order, counts, {token: names[token] for token in in_order})
