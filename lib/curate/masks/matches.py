"""Record masked matches: the kind and the row of each, and the shapes of a few of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.core.data_names import find_source
from lib.core.paths import escape_path
from lib.curate.masks.choices import EMAIL, IBAN, KINDS

MOST_SHAPES = 10  # shapes to keep for each kind
TOP_LEVEL = "(no directory)"
_OTHERS = "(other directories)"
_MOST_SOURCES = 1000
_LONGEST_NAME = 500  # characters of a source
_SPELT_AT = re.compile(r"\s?[\[(]\s?at\s?[\])]\s?", re.IGNORECASE)


@dataclass
class MaskedMatches:
    """Lists the matches in some rows.

    rows: for each kind, the increasing row numbers of the matches. shapes: for each kind, the row
    and the shape (see `describe_shape`) of the first matches.
    """

    rows: dict[str, list[int]] = field(default_factory=dict)
    shapes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, row: int, kind: str, match: bytes) -> None:
        """Add a match."""
        self.rows.setdefault(kind, []).append(row)
        shapes = self.shapes.setdefault(kind, [])
        if len(shapes) < MOST_SHAPES:
            shapes.append((row, describe_shape(kind, match)))

    def move(self, rows: Sequence[int]) -> MaskedMatches:
        """Return the matches with new row numbers. rows: the new number of each row."""
        return MaskedMatches(
            {kind: [rows[row] for row in numbers] for kind, numbers in self.rows.items()},
            {
                kind: [(rows[row], shape) for row, shape in shapes]
                for kind, shapes in self.shapes.items()
            },
        )

    def extend(self, other: MaskedMatches, rows_before: int) -> None:
        """Add the matches of later rows. rows_before: number of rows before these rows."""
        for kind, rows in other.rows.items():
            self.rows.setdefault(kind, []).extend(row + rows_before for row in rows)
        for kind, shapes in other.shapes.items():
            mine = self.shapes.setdefault(kind, [])
            mine += [(row + rows_before, shape) for row, shape in shapes]
            del mine[MOST_SHAPES:]


def count_matches(hits: MaskedMatches, sources: Sequence[str]) -> dict[str, Any]:
    """Return matches as values for JSON, see `add_counts`. sources: the source of each row."""
    counts: dict[str, Counter[str]] = {}
    for kind, rows in hits.rows.items():
        for row in rows:
            name = find_source(sources[row])[:_LONGEST_NAME]
            counts.setdefault(name, Counter())[kind] += 1
    shapes = {kind: [shape for _, shape in shapes] for kind, shapes in hits.shapes.items()}
    return {"sources": {name: dict(kinds) for name, kinds in counts.items()}, "shapes": shapes}


def add_counts(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of earlier and later rows.

    sources: for each source (a top-level directory), the number of matches by kind. shapes: for
    each kind, the shapes of the first matches.
    """
    counts = dict(total.get("sources", {}))
    for name, kinds in more.get("sources", {}).items():
        place = _OTHERS if name not in counts and len(counts) >= _MOST_SOURCES else name
        counts[place] = dict(Counter(counts.get(place, {})) + Counter(kinds))
    shapes = dict(total.get("shapes", {}))
    for kind, found in more.get("shapes", {}).items():
        shapes[kind] = [*shapes.get(kind, ()), *found][:MOST_SHAPES]
    return {"sources": counts, "shapes": shapes}


def sum_kinds(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of matches by kind, in the order of KINDS. counts: see `add_counts`."""
    total = sum(map(Counter, counts.get("sources", {}).values()), Counter[str]())
    return {kind: total[kind] for kind in KINDS if total[kind]}


def rank_sources(counts: Mapping[str, Any], *kinds: str) -> dict[str, int]:
    """Return the number of matches of some kinds by source, the most first."""
    numbers = {
        escape_path(name) or TOP_LEVEL: sum(found.get(kind, 0) for kind in kinds)
        for name, found in counts.get("sources", {}).items()
    }
    ranked = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return {name: number for name, number in ranked if number}


def describe_shape(kind: str, match: bytes) -> str:
    """Return the form of a match without its content, such as `a…@b….de` or `+00 000 0000000`."""
    text = match.decode(errors="replace")
    if kind == EMAIL:
        local, _, domain = _SPELT_AT.sub("@", text).partition("@")
        return f"{local[0]}…@{domain[0]}…{domain[domain.rfind('.') :]}"
    if kind == IBAN:
        return text[:2] + re.sub("[A-Z]", "A", re.sub(r"\d", "0", text[2:]))
    return re.sub("[a-fA-F]", "a", re.sub(r"\d", "0", text))
