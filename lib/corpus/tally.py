"""Holds what rows shall look like, counts what became of the input, and says what is odd."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import iadd, ior
from typing import Any

from lib.core import units

TRAIN, VALIDATION = "train", "validation"
ERRORS = "errors.jsonl"
_NAMED = 5
_MOST_VALIDATION = 50  # percent
# Problems by which a file counts as failed; of the others it simply holds no (clean) text.
FAILURES = {"syntax", "unreadable", "unsupported", "nesting", "aliases", "cut", "crash",
            "too large"}


@dataclass(frozen=True)
class Shape:
    """Holds the options of stage 02 that decide how documents become rows."""

    fields: tuple[str, ...] = ()
    strings: str = "joined"
    min_chars: int = 0
    validation_percent: float = 0.0
    keep_source: bool = False
    dedup: str = "none"
    fallback_encoding: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)


@dataclass
class Tally:
    """Counts what became of some input.

    other_fields: how many documents have text under keys that --fields does not name, of the first
    thousand of each unit.
    """

    documents: int = 0
    short: int = 0
    replaced: int = 0
    lines_lost: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    fields_seen: set[str] = field(default_factory=set)
    other_fields: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add what became of other input."""
        for name, more in vars(other).items():
            join = ior if isinstance(more, set) else iadd
            setattr(self, name, join(getattr(self, name), more))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return vars(self) | {"failed": sorted(self.failed), "fields_seen": sorted(self.fields_seen)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return what `to_json` was made of."""
        return cls(**value | {"problems": Counter(value["problems"]), "failed": {*value["failed"]},
                              "fields_seen": {*value["fields_seen"]},
                              "other_fields": Counter(value.get("other_fields", {}))})


def format_problem(path: str, offset: int | None, line: int | None, kind: str, message: str,
                   action: str) -> bytes:
    """Return a line of errors.jsonl."""
    return json.dumps({"path": path, "offset": offset, "line": line, "kind": kind,
                       "message": message, "action": action}).encode() + b"\n"


def list_doubts(tally: Tally, shape: Shape, rows_of: Mapping[str, int], duplicates: int,
                ) -> list[str]:
    """Return what is odd about a dataset, a sentence each: options that found little text, say.

    rows_of: by split. duplicates: rows that --dedup dropped.
    """
    rows, found = sum(rows_of.values()), []
    if missing := sorted({*shape.fields} - tally.fields_seen):
        found.append(f"--fields: no document has {' or '.join(map(repr, missing))}"
                     + (describe_other_fields(tally) or "\nthere is no other field with text"))
    if shape.fields and (without := tally.problems["no string"]) > tally.documents:
        total = tally.documents + without
        found.append(f"--fields {','.join(shape.fields)} found text in only {tally.documents:,} of "
                     f"{total:,} documents ({100 * tally.documents / total:.1f} %)"
                     + describe_other_fields(tally))
    if tally.lines_lost:
        found.append(f"{units.counted(tally.lines_lost, 'line')} of CSV are lost behind quotes "
                     f"that are not closed; {ERRORS} says in which files and lines")
    if maybe := tally.problems["quote"]:
        found.append(f"{units.counted(maybe, 'row')} of CSV may hold many rows, as a quote is not "
                     f"closed; {ERRORS} says in which files and lines")
    if tally.short > rows:
        found.append(f"--min-chars {shape.min_chars:,} dropped {tally.short:,} of "
                     f"{tally.short + rows + duplicates:,} rows")
    if shape.validation_percent and not all(rows_of.values()):
        found.append("the validation split is empty: the corpus is small for --validation-percent "
                     f"{shape.validation_percent:g}")
    elif shape.validation_percent > _MOST_VALIDATION:
        found.append(f"--validation-percent {shape.validation_percent:g} leaves "
                     f"{units.counted(rows_of[TRAIN], 'row')} to train on; 0.1 to 5 is usual")
    return found


def describe_other_fields(tally: Tally) -> str:
    """Return a line with the fields that --fields might have meant, "" when there are none."""
    often = sorted(tally.other_fields.items(), key=lambda item: (-item[1], item[0]))
    seen = ", ".join(f"{name} ({count:,})" for name, count in often[:_NAMED])
    return f"\nother fields with text, the most frequent first: {seen}" if seen else ""
