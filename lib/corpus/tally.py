"""Count the documents, conversations and problems of the input."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import iadd, ior
from typing import Any

from lib.core import units
from lib.core.errors import UsageError
from lib.core.paths import escape_path
from lib.corpus import conversations, kinds

ERRORS = "errors.jsonl"
# Kinds of problems that count a file as failed. Other kinds describe its content, such as `empty`.
FAILURES = {
    "syntax",
    "unreadable",
    "unsupported",
    "nesting",
    "aliases",
    "cut",
    "crash",
    "too large",
    "damaged",
    "encrypted",
    "timeout",
    *kinds.FAULTS,
}
_EXPLAINED = ("unsupported", *kinds.FAULTS)  # kinds of problems whose messages say what to do
_NAMED = 3  # paths per format that an error prints
_LISTED = 1000  # paths per format that the manifest lists
_MOST_OTHERS = 3
_MOST_MIXED = 20
_MOST_KEYS = 1000
_LONGEST_KEY = 60
_OTHER_KEYS = "record: (others)"
_NAMED_KEYS = 10
FirstUse = tuple[str, "int | None"]  # a format, and the line of its first conversation


@dataclass
class ChatTotals:
    """Counts conversations.

    turns: number of turns per role. characters: length of all contents.
    """

    conversations: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    characters: int = 0
    with_tools: int = 0
    with_weights: int = 0

    def add(self, other: ChatTotals) -> None:
        """Add the counts of other conversations."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    @property
    def mean_turns(self) -> float:
        """Return the average number of turns in a conversation."""
        return sum(self.turns.values()) / max(1, self.conversations)


@dataclass
class ChatTally:
    """Records the counts and formats of the conversations in some input.

    formats: the format of each file, by path. mixed: for a file with two formats, the first use of
    both, by path. others: descriptions of the first records that are not conversations. unused:
    number of values under each key that is not used, such as `turn: name`.
    """

    counts: ChatTotals = field(default_factory=ChatTotals)
    formats: dict[str, FirstUse] = field(default_factory=dict)
    mixed: dict[str, tuple[FirstUse, FirstUse]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)

    def note_unused(self, keys: Iterable[str], count: int = 1) -> None:
        """Count keys that are not used; after the first thousand, new keys count together."""
        for key in keys:
            is_new = key not in self.unused and len(self.unused) >= _MOST_KEYS
            self.unused[_OTHER_KEYS if is_new else key[:_LONGEST_KEY]] += count

    def note_format(self, path: str, name: str, line: int | None) -> None:
        """Record the format of a conversation."""
        first = self.formats.setdefault(path, (name, line))
        if first[0] != name and path not in self.mixed:
            self.mixed[path] = first, (name, line)

    def note_other(self, path: str, line: int | None, description: str) -> None:
        """Record the description of a record that is not a conversation."""
        if len(self.others) < _MOST_OTHERS:
            position = f", line {line:,}" if line else ""
            self.others.append(f"{escape_path(path)}{position}: {description}")

    def add(self, other: ChatTally, lines_before: int) -> None:
        """Add the tally of other input.

        lines_before: number of lines before this input, if it is a later span of a large file.
        """

        def shift(use: FirstUse) -> FirstUse:
            name, line = use
            return name, line + lines_before if line else line

        for path, use in other.formats.items():
            self.note_format(path, *shift(use))
        for path, (_, second) in other.mixed.items():
            self.note_format(path, *shift(second))
        self.others = (self.others + other.others)[:_MOST_OTHERS]
        for key, count in other.unused.items():
            self.note_unused([key], count)
        self.counts.add(other.counts)

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values for JSON."""
        return vars(self) | {"counts": vars(self.counts)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChatTally:
        """Return the tally that `to_json` has converted."""
        tally = cls(**value)
        if counts := value.get("counts"):
            tally.counts = ChatTotals(**counts | {"turns": Counter(counts["turns"])})
        tally.unused = Counter(tally.unused)
        tally.formats = {path: (name, line) for path, (name, line) in tally.formats.items()}
        tally.mixed = {
            path: ((one[0], one[1]), (two[0], two[1])) for path, (one, two) in tally.mixed.items()
        }
        return tally

    def find_mixture(self) -> UsageError | None:
        """Return an error that names the files with several formats, None if there are none."""
        if not self.mixed:
            return None
        lines = [
            f"{escape_path(path)}: {one} in line {first or 0:,}, {two} in line {second or 0:,}"
            for path, ((one, first), (two, second)) in self.mixed.items()
        ]
        subject = (
            f"{escape_path(next(iter(self.mixed)))} mixes formats"
            if len(lines) == 1
            else f"{len(lines):,} files mix formats"
        )
        return UsageError(
            f"{subject} of conversations",
            expected="one format per file",
            found=units.join_lines(lines, _MOST_MIXED),
            hint="put each format into its own file",
        )

    def by_format(self) -> dict[str, list[str]]:
        """Return the paths of each format, the format with the most files first."""
        files: dict[str, list[str]] = {}
        for path, (name, _) in self.formats.items():
            files.setdefault(name, []).append(escape_path(path))
        return dict(sorted(files.items(), key=lambda item: -len(item[1])))

    def summary(self, problems: Mapping[str, int]) -> dict[str, Any]:
        """Return the manifest entry for the conversations.

        problems: number of lines in errors.jsonl, by kind.
        """
        counts = self.counts
        return {
            "formats": {
                name: {"files": len(paths), "paths": paths[:_LISTED]}
                for name, paths in self.by_format().items()
            },
            **vars(counts),
            "turns": dict(counts.turns.most_common()),
            "mean_turns": round(counts.mean_turns, 2),
            "unused_keys": dict(self.unused.most_common()),
            "dropped": {kind: problems[kind] for kind in conversations.KINDS if problems.get(kind)},
        }

    def format_lines(self) -> dict[str, str]:
        """Return the lines of the summary that stage 02 prints, by label."""
        formats = [
            f"{name} in {units.counted(len(paths), 'file')} ({units.join_names(paths, _NAMED)})"
            for name, paths in self.by_format().items()
        ]
        counts = self.counts
        turns = ", ".join(f"{count:,} {role}" for role, count in counts.turns.most_common())
        return {
            "formats": "; ".join(formats),
            "turns": f"{turns}; {counts.mean_turns:.1f} per conversation on average",
            "content": f"{counts.characters:,} characters; "
            f"{units.counted(counts.with_tools, 'conversation')} with tools, "
            f"{counts.with_weights:,} with weights",
            **self.format_unused(),
        }

    def format_unused(self) -> dict[str, str]:
        """Return the line of a printed table about the keys that are not used, {} without any."""
        groups: dict[str, list[str]] = {}
        for key, count in sorted(self.unused.items(), key=lambda item: (-item[1], item[0])):
            holder, _, name = key.partition(": ")
            groups.setdefault(holder, []).append(f"{escape_path(name)} ({count:,})")
        texts = [
            f"{holder}s: {units.join_names(groups[holder], _NAMED_KEYS)}"
            for holder in ("record", "turn", "part")
            if holder in groups
        ]
        return {"unused keys": "; ".join(texts)} if texts else {}


@dataclass
class Tally:
    """Counts the documents and problems of some input.

    documents: documents with a row. short: rows that --min-chars has dropped. replaced:
    replacements of invalid bytes. lines_lost: lines of CSV lost because of unclosed quotes.
    long_rows: rows of CSV with more cells than the header. problems: lines of errors.jsonl by kind.
    failed: paths of failed files. fields_seen: names in --fields that occur. other_fields: for each
    key that --fields does not select, number of documents with text under it, among the first
    thousand of each unit. as_text: number of conversations that became plain text, by format, among
    the first documents of each file. extracted: documents whose text was extracted, by kind.
    without_text: documents from which nothing was extracted, by kind and problem, such as `pdf:
    damaged`. not_extracted: files of these kinds that --extract does not name. table_formats: files
    by kind and unusual format, such as `csv: the separator ";"`. first_of: for each kind of problem
    whose message says what to do, the first file with its message. chat: the tally of a chat
    dataset.
    """

    documents: int = 0
    short: int = 0
    replaced: int = 0
    lines_lost: int = 0
    long_rows: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    fields_seen: set[str] = field(default_factory=set)
    other_fields: Counter[str] = field(default_factory=Counter)
    as_text: Counter[str] = field(default_factory=Counter)
    extracted: Counter[str] = field(default_factory=Counter)
    without_text: Counter[str] = field(default_factory=Counter)
    not_extracted: Counter[str] = field(default_factory=Counter)
    table_formats: Counter[str] = field(default_factory=Counter)
    first_of: dict[str, str] = field(default_factory=dict)
    chat: ChatTally = field(default_factory=ChatTally)

    def add(self, other: Tally, lines_before: int = 0) -> None:
        """Add the tally of other input.

        lines_before: number of lines before this input, if it is a later span of a large file.
        """
        self.chat.add(other.chat, lines_before)
        for name, more in vars(other).items():
            if name == "first_of":
                self.first_of = more | self.first_of
            elif name != "chat":
                join = ior if isinstance(more, set) else iadd
                setattr(self, name, join(getattr(self, name), more))

    def note_problem(self, path: str, kind: str, message: str) -> None:
        """Count a problem of a file."""
        self.problems[kind] += 1
        if kind in FAILURES:
            self.failed.add(path)
        if kind in _EXPLAINED:
            self.first_of.setdefault(kind, f"{escape_path(path)}: {message}")

    def explain_failures(self) -> list[str]:
        """Return a sentence for each kind of problem whose message says what to do."""
        return [
            f"{units.counted(self.problems[kind], 'file')} failed as `{kind}`, the first is {first}"
            for kind, first in self.first_of.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values for JSON."""
        return vars(self) | {
            "failed": sorted(self.failed),
            "fields_seen": sorted(self.fields_seen),
            "chat": self.chat.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return the tally that `to_json` of this version or an earlier one has converted."""
        # The parts of some versions count the dropped rows of several rules.
        short = value.get("short", value.get("dropped", {}).get("short", 0))
        return cls(
            **{name: count for name, count in value.items() if name in cls.__dataclass_fields__}
            | {
                "short": short,
                "problems": Counter(value["problems"]),
                "failed": {*value["failed"]},
                "fields_seen": {*value["fields_seen"]},
                "other_fields": Counter(value.get("other_fields", {})),
                "as_text": Counter(value.get("as_text", {})),
                "extracted": Counter(value.get("extracted", {})),
                "without_text": Counter(value.get("without_text", {})),
                "not_extracted": Counter(value.get("not_extracted", {})),
                "table_formats": Counter(value.get("table_formats", {})),
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
