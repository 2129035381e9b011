"""Count which test questions occur in which documents; counts of several units can be added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLES = 3  # hits of each test set that the report shows


class HitSample(NamedTuple):
    """A question that occurs in a document.

    split, row, source: the place of the document. question: number of the question in its set.
    share: the part of its n-grams that the document contains. n_gram: the first of them in the
    document.
    """

    split: str
    row: int
    source: str
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

    def to_json(self) -> dict[str, Any]:
        """Return the counts as values for JSON."""
        return vars(self) | {
            "sets": {
                name: vars(set_hits)
                | {"questions": {str(n): count for n, count in set_hits.questions.items()}}
                for name, set_hits in self.sets.items()
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TestHits:
        """Return the counts that `to_json` has converted, no hits for {}."""
        sets = {
            name: SetHits(
                record["documents"],
                Counter({int(number): count for number, count in record["questions"].items()}),
                [HitSample(*sample) for sample in record["samples"]],
            )
            for name, record in value.get("sets", {}).items()
        }
        return cls(**{**value, "sets": sets})


def add_hits(total: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Add the counts of later documents to `total`, and return it; both are values for JSON.

    Adding takes time for the new counts only, since a large dataset has many units.
    """
    total = total or TestHits().to_json()
    for name in ("compared", "documents", "beginnings"):
        total[name] += more[name]
    for name, added in more["sets"].items():
        nothing = {"documents": 0, "questions": {}, "samples": []}
        set_hits = total["sets"].setdefault(name, nothing)
        set_hits["documents"] += added["documents"]
        for number, count in added["questions"].items():
            set_hits["questions"][number] = set_hits["questions"].get(number, 0) + count
        set_hits["samples"] = [*set_hits["samples"], *added["samples"]][:SAMPLES]
    return total
