"""Count the documents and problems of the input."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from operator import iadd, ior
from typing import Any

from lib.corpus.chat_tally import ChatTally

ERRORS = "errors.jsonl"
# Kinds of problems that count a file as failed. The other kinds mean that it has no clean text.
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


@dataclass
class Tally:
    """Count the documents and problems of some input.

    documents: documents with a row. dropped: rows that a rule has dropped, by the kind of the rule.
    replaced: replacements of invalid bytes. lines_lost: lines of CSV lost because of unclosed
    quotes. problems: lines of errors.jsonl by kind. failed: paths of failed files. fields_seen:
    names in --fields that occur. other_fields: number of documents with text under other keys,
    among the first thousand of each unit. as_text: conversations that became plain text, by format,
    among the first documents of each file. chat: the tally of a chat dataset.
    """

    documents: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    lines_lost: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    fields_seen: set[str] = field(default_factory=set)
    other_fields: Counter[str] = field(default_factory=Counter)
    as_text: Counter[str] = field(default_factory=Counter)
    chat: ChatTally = field(default_factory=ChatTally)

    def add(self, other: Tally, lines_before: int = 0) -> None:
        """Add the tally of other input.

        lines_before: number of lines before this input, if it is a later span of a large file.
        """
        self.chat.add(other.chat, lines_before)
        for name, more in vars(other).items():
            if name != "chat":
                join = ior if isinstance(more, set) else iadd
                setattr(self, name, join(getattr(self, name), more))

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values for JSON."""
        return vars(self) | {
            "failed": sorted(self.failed),
            "fields_seen": sorted(self.fields_seen),
            "chat": self.chat.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return the tally that `to_json` has converted."""
        # Parts that an earlier version has kept count only the rows below --min-chars, as `short`.
        dropped = value.get("dropped", {"short": value.get("short", 0)})
        return cls(
            **{name: count for name, count in value.items() if name != "short"}
            | {
                "dropped": Counter(dropped),
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
