"""Count which test questions occur in which documents; counts of several units can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLES = 3  # hits of each test set that the report shows


class HitSample(NamedTuple):
    """A question that occurs in a document.

    path, position: the place of the document. question: number of the question in its set. share:
    the part of its n-grams that the document contains. n_gram: the first of them in the document.
    """

    path: str
    position: int
    question: int
    share: float
    n_gram: str


@dataclass
class SetHits:
    """Counts the hits of a test set.

    documents: number of documents with any question of the set. questions: number of documents with
    a question, by the number of the question. samples: the first hits.
    """

    documents: int = 0
    questions: Counter[int] = field(default_factory=Counter)
    samples: list[HitSample] = field(default_factory=list)


@dataclass
class TestHits:
    """Counts the hits of all test sets.

    compared: number of compared documents. documents: number of documents with any question.
    beginnings: number of documents above 64 MB; only their beginnings were compared.
    sets: the test sets with hits, by name.
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
            set_hits = self.sets.setdefault(name, SetHits())
            set_hits.documents += more.documents
            set_hits.questions += more.questions
            shifted = [
                sample._replace(position=sample.position + rows_before) for sample in more.samples
            ]
            set_hits.samples = (set_hits.samples + shifted)[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Return the counts as values for JSON."""
        return vars(self) | {
            "sets": {
                name: vars(set_hits) | {"questions": dict(sorted(set_hits.questions.items()))}
                for name, set_hits in self.sets.items()
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TestHits:
        """Return the counts that `to_json` has converted."""
        sets = {
            name: SetHits(
                record["documents"],
                Counter({int(number): count for number, count in record["questions"].items()}),
                [HitSample(*sample) for sample in record["samples"]],
            )
            for name, record in value.get("sets", {}).items()
        }
        return cls(**{**value, "sets": sets})
