"""Record masked matches: the kind and the row of each, and the shapes of a few of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lib.curate.masks.choices import EMAIL, IBAN, KINDS

if TYPE_CHECKING:
    import numpy as np

MOST_SHAPES = 10  # shapes to keep for each kind
_MOST_SOURCES = 1000  # sources that the manifest lists
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


@dataclass
class MaskTally:
    """Counts the matches in the rows that a dataset contains.

    sources: for each source, the number of matches by kind. shapes: for each kind, the shapes of
    the first matches.
    """

    sources: dict[str, Counter[str]] = field(default_factory=dict)
    shapes: dict[str, list[str]] = field(default_factory=dict)

    def add(
        self,
        hits: MaskedMatches,
        copies: np.ndarray | None,
        spans: Iterable[tuple[str, int, int]],
    ) -> None:
        """Add the matches in a part.

        copies: how many times each row is written ([rows], None: all once); a row counts once.
        spans: the source of each file or span in the part, its first row and the row after its last
        one.
        """
        import numpy as np

        rows = {kind: np.array(numbers) for kind, numbers in hits.rows.items()}
        if copies is not None:
            rows = {kind: numbers[copies[numbers] > 0] for kind, numbers in rows.items()}
        for source, start, stop in spans if rows else ():
            counts = {
                kind: int(((numbers >= start) & (numbers < stop)).sum())
                for kind, numbers in rows.items()
            }
            if any(counts.values()):
                total = self.sources.setdefault(source, Counter())
                total.update({kind: count for kind, count in counts.items() if count})
        for kind, shapes in hits.shapes.items():
            mine = self.shapes.setdefault(kind, [])
            mine += [shape for row, shape in shapes if copies is None or copies[row] > 0]
            del mine[MOST_SHAPES:]

    @property
    def total(self) -> Counter[str]:
        """Return the number of matches by kind."""
        return sum(self.sources.values(), Counter())

    def summary(self) -> dict[str, Any]:
        """Return the counts and shapes for the manifest."""
        total = self.total
        listed = sorted(self.sources.items(), key=lambda item: (-item[1].total(), item[0]))
        return {
            "counts": {kind: total[kind] for kind in KINDS if total[kind]},
            "sources": {
                source: dict(sorted(counts.items())) for source, counts in listed[:_MOST_SOURCES]
            },
            "shapes": {kind: self.shapes[kind] for kind in KINDS if self.shapes.get(kind)},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values for JSON."""
        return vars(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MaskTally:
        """Return the tally that `to_json` has converted."""
        sources = {name: Counter(counts) for name, counts in value.get("sources", {}).items()}
        return cls(sources, dict(value.get("shapes", {})))


def describe_shape(kind: str, match: bytes) -> str:
    """Return the form of a match without its content, such as `a…@b….de` or `+00 000 0000000`."""
    text = match.decode(errors="replace")
    if kind == EMAIL:
        local, _, domain = _SPELT_AT.sub("@", text).partition("@")
        return f"{local[0]}…@{domain[0]}…{domain[domain.rfind('.') :]}"
    if kind == IBAN:
        return text[:2] + re.sub("[A-Z]", "A", re.sub(r"\d", "0", text[2:]))
    return re.sub("[a-fA-F]", "a", re.sub(r"\d", "0", text))
