"""Holds what rows shall look like, and counts what became of the input."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from operator import iadd, ior
from typing import Any

from lib.corpus.chat_tally import ChatTally

TRAIN = "train"
VALIDATION = "validation"
TEXT, CHAT = FORMATS = "text", "chat"  # of a dataset
ERRORS = "errors.jsonl"
# Problems by which a file counts as failed; of the others it simply holds no (clean) text.
FAILURES = {
    "syntax",
    "unreadable",
    "unsupported",
    "nesting",
    "aliases",
    "cut",
    "crash",
    "too large",
}


@dataclass(frozen=True)
class RowOptions:
    """Holds the options of stage 02 that decide how documents become rows."""

    fields: tuple[str, ...] = ()
    strings: str = "joined"
    min_chars: int = 0
    validation_percent: float = 0.0
    keep_source: bool = False
    dedup: str = "none"
    fallback_encoding: str = ""
    format: str = TEXT

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)


@dataclass
class Tally:
    """Counts what became of some input.

    other_fields: how many documents have text under keys that --fields does not name, of the first
    thousand of each unit. as_text: how many conversations became plain text, by their format, of
    the first documents of each file. chat: of a chat dataset.
    """

    documents: int = 0
    short: int = 0
    replaced: int = 0
    lines_lost: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    fields_seen: set[str] = field(default_factory=set)
    other_fields: Counter[str] = field(default_factory=Counter)
    as_text: Counter[str] = field(default_factory=Counter)
    chat: ChatTally = field(default_factory=ChatTally)

    def add(self, other: Tally, lines_before: int = 0) -> None:
        """Add what became of other input. lines_before: of a file that is cut, before this part."""
        self.chat.add(other.chat, lines_before)
        for name, more in vars(other).items():
            if name != "chat":
                join = ior if isinstance(more, set) else iadd
                setattr(self, name, join(getattr(self, name), more))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return vars(self) | {
            "failed": sorted(self.failed),
            "fields_seen": sorted(self.fields_seen),
            "chat": self.chat.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return what `to_json` was made of."""
        return cls(
            **value
            | {
                "problems": Counter(value["problems"]),
                "failed": {*value["failed"]},
                "fields_seen": {*value["fields_seen"]},
                "other_fields": Counter(value.get("other_fields", {})),
                "as_text": Counter(value.get("as_text", {})),
                "chat": ChatTally.from_json(value.get("chat", {})),
            }
        )


def format_problem(
    path: str, offset: int | None, line: int | None, kind: str, message: str, action: str
) -> bytes:
    """Return a line of errors.jsonl."""
    return (
        json.dumps(
            {
                "path": path,
                "offset": offset,
                "line": line,
                "kind": kind,
                "message": message,
                "action": action,
            }
        ).encode()
        + b"\n"
    )
