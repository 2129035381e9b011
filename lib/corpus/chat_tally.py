"""Counts conversations, and notes which format each file has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lib.core import units
from lib.core.errors import UsageError
from lib.corpus import conversations
from lib.corpus.scan import escape_path

_NAMED = 3  # files of a format on the console
_LISTED = 1000  # files of a format in the manifest
_MOST_OTHERS = 3
_MOST_MIXED = 20
Found = tuple[str, "int | None"]  # a format, and the line of its first conversation


@dataclass
class ChatTotals:
    """Counts conversations. turns: by role. characters: of all contents."""

    conversations: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    characters: int = 0
    with_tools: int = 0
    with_weights: int = 0

    def add(self, other: ChatTotals) -> None:
        """Add what was counted elsewhere."""
        for name, more in vars(other).items():
            setattr(self, name, getattr(self, name) + more)

    @property
    def mean_turns(self) -> float:
        """Return how many turns a conversation has."""
        return sum(self.turns.values()) / max(1, self.conversations)


@dataclass
class ChatTally:
    """Says what the conversations of some input are.

    formats: by path. mixed: of files that have a second format both, the first of each. others:
    what the first records hold that are no conversation.
    """

    counts: ChatTotals = field(default_factory=ChatTotals)
    formats: dict[str, Found] = field(default_factory=dict)
    mixed: dict[str, tuple[Found, Found]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def note_format(self, path: str, name: str, line: int | None) -> None:
        """Note the format of a record."""
        first = self.formats.setdefault(path, (name, line))
        if first[0] != name and path not in self.mixed:
            self.mixed[path] = first, (name, line)

    def note_other(self, path: str, line: int | None, what: str) -> None:
        """Note what there is instead of a conversation."""
        if len(self.others) < _MOST_OTHERS:
            where = f", line {line:,}" if line else ""
            self.others.append(f"{escape_path(path)}{where}: {what}")

    def add(self, other: ChatTally, lines_before: int) -> None:
        """Add what became of other input. lines_before: of a file that is cut, before this part."""

        def shift(found: Found) -> Found:
            name, line = found
            return name, line + lines_before if line else line

        for path, found in other.formats.items():
            self.note_format(path, *shift(found))
        for path, (_, second) in other.mixed.items():
            self.note_format(path, *shift(second))
        self.others = (self.others + other.others)[:_MOST_OTHERS]
        self.counts.add(other.counts)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return vars(self) | {"counts": vars(self.counts)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChatTally:
        """Return what `to_json` was made of."""
        known = cls(**value)
        if counts := value.get("counts"):
            known.counts = ChatTotals(**counts | {"turns": Counter(counts["turns"])})
        known.formats = {path: (name, line) for path, (name, line) in known.formats.items()}
        known.mixed = {
            path: ((one[0], one[1]), (two[0], two[1])) for path, (one, two) in known.mixed.items()
        }
        return known

    def find_mixture(self) -> UsageError | None:
        """Return the error that names the files with more than one format, if there are any."""
        if not self.mixed:
            return None
        lines = [
            f"{escape_path(path)}: {one} in line {first or 0:,}, {two} in line {second or 0:,}"
            for path, ((one, first), (two, second)) in self.mixed.items()
        ]
        what = (
            f"{escape_path(next(iter(self.mixed)))} mixes formats"
            if len(lines) == 1
            else f"{len(lines):,} files mix formats"
        )
        return UsageError(
            f"{what} of conversations",
            found=units.join_lines(lines, _MOST_MIXED),
            hint="give each format a file of its own",
        )

    def by_format(self) -> dict[str, list[str]]:
        """Return the files of each format, of the most frequent first."""
        files: dict[str, list[str]] = {}
        for path, (name, _) in self.formats.items():
            files.setdefault(name, []).append(escape_path(path))
        return dict(sorted(files.items(), key=lambda item: -len(item[1])))

    def summary(self, problems: Mapping[str, int]) -> dict[str, Any]:
        """Return what the manifest says of the conversations that were read.

        problems: lines of errors.jsonl by kind.
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
            "dropped": {kind: problems[kind] for kind in conversations.KINDS if problems.get(kind)},
        }

    def in_lines(self) -> dict[str, str]:
        """Return the lines of the report."""
        formats = [
            f"{name} in {units.counted(len(paths), 'file')} ({units.join_names(paths, _NAMED)})"
            for name, paths in self.by_format().items()
        ]
        counts = self.counts
        turns = ", ".join(f"{count:,} {role}" for role, count in counts.turns.most_common())
        return {
            "formats": "; ".join(formats),
            "turns": f"{turns}; {counts.mean_turns:.1f} in a conversation on average",
            "of these": f"{counts.characters:,} characters; "
            f"{units.counted(counts.with_tools, 'conversation')} with tools, "
            f"{counts.with_weights:,} with weights",
        }
