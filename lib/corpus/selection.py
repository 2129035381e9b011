"""Decide which rows a dataset keeps, by the tables RULES, SIDECARS and DECISIONS.

A rule looks at one row alone and drops it for a reason. So the order of the rules and the number of
workers do not change which rows are kept.

A sidecar is a value of fixed width that a worker computes for each row and writes to a file beside
the rows, such as a digest of the text. A decision reads the sidecars of all rows in order and
selects the rows to keep, such as the rows that equal no earlier row.

A rule or decision is on if its field of RowOptions does not have the default value. A sidecar is
computed if a decision that is on reads it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lib.core import declared
from lib.corpus.dedup import DIGEST_BYTES, DigestSet
from lib.corpus.row_options import RowOptions

if TYPE_CHECKING:
    import numpy as np


class RowText:
    """The text of a row as rules and sidecars see it.

    strings: the text, or the contents of all turns of a conversation. If a text is larger than
    memory, only its beginning is given. characters: length of the whole text (default: of strings).
    """

    __slots__ = ("_characters", "_strings")

    def __init__(self, strings: Iterable[str], characters: int | None = None) -> None:
        self._strings = list(strings)
        self._characters = characters

    @property
    def text(self) -> str:
        """Return the text; the contents of turns are joined by newlines."""
        return "\n".join(self._strings)

    @property
    def characters(self) -> int:
        """Return the number of characters, newlines between turns not included."""
        return sum(map(len, self._strings)) if self._characters is None else self._characters


class Rule(NamedTuple):
    """A reason to drop a row that depends on this row alone.

    option: the field of RowOptions that switches it on. find_reason: function of the text of a row
    and the value of the option; it returns why the row is dropped, "" to keep it. The reason
    completes the sentence "3 rows are …".
    """

    option: str
    find_reason: Callable[[RowText, Any], str]


class Sidecar(NamedTuple):
    """A value that workers compute for each row and store beside the rows.

    width: bytes per row. measure: function of the text of a row and the SHA-256 of its content;
    it returns the value of the row in `width` bytes.
    """

    width: int
    measure: Callable[[RowText, bytes], bytes]


class Decider(Protocol):
    """Decides which rows of a dataset to keep, in their order.

    file: stores the decider's state from earlier rows. A resumed build truncates the file to the
    recorded progress, and the decider begins with its content.
    """

    @property
    def file(self) -> io.BufferedIOBase:
        """Return the file with the decider's state."""
        ...

    def add(self, *sidecars: np.ndarray) -> np.ndarray:
        """Return which of the next n rows to keep (bool [n]); sidecars: uint8 [n, width]."""
        ...


class Decision(NamedTuple):
    """A choice among all rows of a dataset, made from their sidecars in order.

    option: the field of RowOptions that switches it on. sidecars: names of the sidecars that it
    reads. start: returns the decider of a dataset; its argument is the path of the decider's file.
    problem, reason: the kind and the end of the sentence "3 rows of train are …" in errors.jsonl.
    """

    option: str
    sidecars: tuple[str, ...]
    start: Callable[[Path], Decider]
    problem: str
    reason: str


def _find_short(row: RowText, min_chars: int) -> str:
    return "shorter than --min-chars" if row.characters < min_chars else ""


# Key: the kind in errors.jsonl, which is also the name of the count in the manifest.
RULES: dict[str, Rule] = {"short": Rule("min_chars", _find_short)}

# Key: the end of a file name, as in `train.digests`.
SIDECARS: dict[str, Sidecar] = {
    "digests": Sidecar(DIGEST_BYTES, lambda row, sha256: sha256[-DIGEST_BYTES:])
}

# Key: the name of the count in the manifest.
DECISIONS: dict[str, Decision] = {
    "duplicates": Decision(
        "dedup", ("digests",), DigestSet, "duplicate", "duplicates of earlier rows"
    )
}


def _is_on(row_options: RowOptions, option: str) -> bool:
    field = next(field for field in dataclasses.fields(row_options) if field.name == option)
    return getattr(row_options, option) != declared.default_of(field)


def list_rules(row_options: RowOptions) -> list[tuple[str, Callable[[RowText, Any], str], Any]]:
    """Return the kind, the function and the option's value of each rule that is on."""
    return [
        (kind, rule.find_reason, getattr(row_options, rule.option))
        for kind, rule in RULES.items()
        if _is_on(row_options, rule.option)
    ]


def list_decisions(row_options: RowOptions) -> dict[str, Decision]:
    """Return the decisions that are on, in their order."""
    return {
        name: decision
        for name, decision in DECISIONS.items()
        if _is_on(row_options, decision.option)
    }


def list_sidecars(row_options: RowOptions) -> dict[str, Sidecar]:
    """Return the sidecars that the decisions need."""
    needed = {
        name for decision in list_decisions(row_options).values() for name in decision.sidecars
    }
    return {name: sidecar for name, sidecar in SIDECARS.items() if name in needed}


def describe_dropped(row_options: RowOptions, counts: Mapping[str, int]) -> dict[str, str]:
    """Return, by kind, the option and value of each rule or decision that dropped rows."""
    tables: dict[str, Rule | Decision] = {**RULES, **DECISIONS}
    return {
        kind: _spell_option(row_options, row.option)
        for kind, row in tables.items()
        if counts.get(kind)
    }


def _spell_option(row_options: RowOptions, name: str) -> str:
    value = getattr(row_options, name)
    return declared.flag(name) if value is True else f"{declared.flag(name)} {value}"
