"""Decide which rows a dataset keeps, by the tables RULES, SIDECARS and DECISIONS.

A rule looks at one row alone and drops it for a reason. So the order of the rules and the number of
workers do not change which rows are kept.

A sidecar is a value of fixed width that a worker computes for each row and writes to a file beside
the rows, such as a digest of the text. A decision reads the sidecars of all rows in order and
selects the rows to keep, such as the rows that equal no earlier row.

A rule or decision is on if its field of RowOptions does not have the default value. A sidecar is
computed if a decision that is on reads it. TWO_PASS_DECISIONS contains the choice among rows that
cannot be made in one pass: which rows are near duplicates.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from lib.core import declared
from lib.corpus.dedup import DIGEST_BYTES, DigestSet
from lib.corpus.near.minhash import Bands, KeyWriter
from lib.corpus.parts import SidecarWriter
from lib.corpus.row_options import NEAR, RowOptions

if TYPE_CHECKING:
    import numpy as np

MOST_CHARACTERS = 16_000_000  # of a text that is compared to find near duplicates


class RowText:
    """The text of a row as rules and sidecars see it.

    strings: the text, or the contents of all turns of a conversation. If a text is larger than
    memory, only its beginning is given. characters: length of the whole text (default: of strings).
    position: number of the row in its file (or in a span of a large file), from 1.
    """

    __slots__ = ("_characters", "_strings", "position")

    def __init__(
        self, strings: Iterable[str], characters: int | None = None, position: int = 0
    ) -> None:
        self._strings = list(strings)
        self._characters = characters
        self.position = position

    @property
    def text(self) -> str:
        """Return the text; the contents of turns are joined by newlines."""
        return "\n".join(self._strings)

    @property
    def characters(self) -> int:
        """Return the number of characters, newlines between turns not included."""
        return sum(map(len, self._strings)) if self._characters is None else self._characters

    @property
    def is_whole(self) -> bool:
        """Return whether `text` is the whole text."""
        return self._characters in (None, sum(map(len, self._strings)))


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

    width: bytes per row (0: it depends on the options). measure: function of the text of a row and
    the SHA-256 of its content; it returns the value of the row in `width` bytes. open_writer: if
    given, it returns a context whose `write` takes what `measure` returns, and which writes the
    values of several rows at once.
    """

    width: int
    measure: Callable[[RowText, bytes], Any]
    open_writer: Callable[[BinaryIO, RowOptions], AbstractContextManager[SidecarWriter]] | None = (
        None
    )


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


class TwoPassDecision(NamedTuple):
    """A choice that needs the sidecars of all rows, after the first pass over the input.

    It is on if `option` has `value`. Other fields: see Decision.
    """

    option: str
    value: str
    sidecars: tuple[str, ...]
    problem: str
    reason: str


def _find_short(row: RowText, min_chars: int) -> str:
    return "shorter than --min-chars" if row.characters < min_chars else ""


def _select_text(row: RowText, sha256: bytes) -> str | None:
    """Return the text for the band keys, None if it is too long to be compared."""
    return row.text if row.is_whole and row.characters <= MOST_CHARACTERS else None


def _open_keys(file: BinaryIO, row_options: RowOptions) -> KeyWriter:
    return KeyWriter(
        file, row_options.near_words, Bands(row_options.near_bands, row_options.near_band_size)
    )


# Key: the kind in errors.jsonl, which is also the name of the count in the manifest.
RULES: dict[str, Rule] = {"short": Rule("min_chars", _find_short)}

# Key: the end of a file name, as in `train.digests`.
SIDECARS: dict[str, Sidecar] = {
    "digests": Sidecar(DIGEST_BYTES, lambda row, sha256: sha256[-DIGEST_BYTES:]),
    "keys": Sidecar(0, _select_text, _open_keys),
    "positions": Sidecar(8, lambda row, sha256: row.position.to_bytes(8, "little")),
}

# Key: the name of the count in the manifest.
DECISIONS: dict[str, Decision] = {
    "duplicates": Decision(
        "dedup", ("digests",), DigestSet, "duplicate", "duplicates of earlier rows"
    )
}

# Decisions that need the sidecars of all rows before they can select the first one. A build with
# one of them has two passes, and makes all its decisions between them (near.py).
TWO_PASS_DECISIONS: dict[str, TwoPassDecision] = {
    "near_duplicates": TwoPassDecision(
        "dedup",
        NEAR,
        ("digests", "keys", "positions"),
        "near duplicate",
        "near duplicates of kept rows",
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
    """Return the decisions that are on, in their order; a two-pass decision replaces them."""
    replaced = {decision.option for decision in list_two_pass_decisions(row_options).values()}
    return {
        name: decision
        for name, decision in DECISIONS.items()
        if _is_on(row_options, decision.option) and decision.option not in replaced
    }


def list_two_pass_decisions(row_options: RowOptions) -> dict[str, TwoPassDecision]:
    """Return the decisions that are on and need two passes."""
    return {
        name: decision
        for name, decision in TWO_PASS_DECISIONS.items()
        if getattr(row_options, decision.option) == decision.value
    }


def list_sidecars(row_options: RowOptions) -> dict[str, Sidecar]:
    """Return the sidecars that the decisions need."""
    decisions: list[Decision | TwoPassDecision] = [
        *list_decisions(row_options).values(),
        *list_two_pass_decisions(row_options).values(),
    ]
    needed = {name for decision in decisions for name in decision.sidecars}
    return {name: sidecar for name, sidecar in SIDECARS.items() if name in needed}


def get_decision(name: str) -> Decision | TwoPassDecision:
    """Return a decision of either table."""
    return DECISIONS.get(name) or TWO_PASS_DECISIONS[name]


def list_counts(row_options: RowOptions) -> list[str]:
    """Return the names of the decisions whose dropped rows the manifest counts."""
    return [*DECISIONS, *list_two_pass_decisions(row_options)]


def describe_dropped(row_options: RowOptions, counts: Mapping[str, int]) -> dict[str, str]:
    """Return, by kind, the option and value of each rule or decision that dropped rows."""
    tables: dict[str, Rule | Decision | TwoPassDecision] = {
        **RULES,
        **DECISIONS,
        **TWO_PASS_DECISIONS,
    }
    return {
        kind: _spell_option(row_options, row.option)
        for kind, row in tables.items()
        if counts.get(kind)
    }


def _spell_option(row_options: RowOptions, name: str) -> str:
    value = getattr(row_options, name)
    return declared.flag(name) if value is True else f"{declared.flag(name)} {value}"
