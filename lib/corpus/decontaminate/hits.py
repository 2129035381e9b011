"""Count which test questions occur in which documents; counts of several units can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLES = 3  # per test set


class HitSample(NamedTuple):
    """A question that occurs in a document.

    path, position: of the document. question: its number in the set. share: of its n-grams that the
    document contains. n_gram: the first of them in the document.
    """

    path: str
    position: int
    question: int
    share: float
    n_gram: str


@dataclass
class SetHits:
    """Count the hits of a test set.

    documents: with any of its questions. questions: number of documents by the number of the
    question. samples: the first hits.
    """

    documents: int = 0
    questions: Counter[int] = field(default_factory=Counter)
    samples: list[HitSample] = field(default_factory=list)


@dataclass
class TestHits:
    """Count the hits of all test sets.

    compared: number of documents. documents: with any question. beginnings: documents larger than
    memory, of which only the beginning was compared. sets: by name, only those with hits.
    """

    __test__ = False  # pytest collects classes with this name otherwise

    compared: int = 0
    documents: int = 0
    beginnings: int = 0
    sets: dict[str, SetHits] = field(default_factory=dict)

    def add(self, other: TestHits, rows_before: int = 0) -> None:
        """Add the hits of later documents.

        rows_before: rows of the same file before them, if they are in a span of a large file.
        """
        self.compared += other.compared
        self.documents += other.documents
        self.beginnings += other.beginnings
        for name, more in other.sets.items():
            own = self.sets.setdefault(name, SetHits())
            own.documents += more.documents
            own.questions += more.questions
            shifted = [each._replace(position=each.position + rows_before) for each in more.samples]
            own.samples = (own.samples + shifted)[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Return the counts as values for JSON."""
        return vars(self) | {
            "sets": {
                name: vars(own) | {"questions": dict(sorted(own.questions.items()))}
                for name, own in self.sets.items()
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TestHits:
        """Return the counts that `to_json` has converted."""
        sets = {
            name: SetHits(
                own["documents"],
                Counter({int(number): count for number, count in own["questions"].items()}),
                [HitSample(*sample) for sample in own["samples"]],
            )
            for name, own in value.get("sets", {}).items()
        }
        return cls(**{**value, "sets": sets})
