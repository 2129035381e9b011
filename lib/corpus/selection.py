"""Decide which rows a dataset keeps, by the tables RULES, RULE_GROUPS, SIDECARS and DECISIONS.

A rule looks at each row alone and drops it for a reason. So the order of the rules and the number
of workers do not change which rows are kept. An entry of RULES checks one row of the dataset at a
time. An entry of RULE_GROUPS stands for several rules that share an option or a computation, and
these rules check rows in batches. Every rule checks every row, so the report can show how many rows
each rule would drop alone.

A column (COLUMNS) contains a value for each row. A worker computes it, rules can read it, and the
dataset contains it.

A sidecar is a value of fixed width that a worker computes for each row and writes to a file beside
the rows, such as a digest of the text. A decision reads the sidecars of all rows in order and
selects the rows to keep, such as the rows that equal no earlier row. Some decisions cannot be made
in one pass, such as which rows are near duplicates; TWO_PASS_DECISIONS contains these.

A rule, column or decision is on if its field of RowOptions does not have the default value. A
sidecar is computed if a decision that is on reads it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lib.core import declared
from lib.corpus.dedup import DIGEST_BYTES, DigestSet
from lib.corpus.row_batch import BatchRule, RowBatch, RowText, RowVerdict
from lib.corpus.row_options import NEAR, RowOptions
from lib.curate import shingles
from lib.curate.classify import language, scores
from lib.curate.decontaminate import matching
from lib.curate.near import minhash
from lib.curate.near.minhash import Bands
from lib.curate.quality import rules as quality
from lib.curate.words import WORDS, find_words

if TYPE_CHECKING:
    import numpy as np

MOST_CHARACTERS = 16_000_000  # a longer text is not compared to find near duplicates


class Rule(NamedTuple):
    """Describes a reason to drop a row that depends on this row alone.

    option: the field of RowOptions that switches the rule on. find_reason: called with the text of
    a row and the value of the option; returns why the row is dropped, or "" to keep it. The reason
    completes the sentences "3 rows are …" and "1 row is …". measure: returns the value of a dropped
    row for dropped.jsonl.
    """

    option: str
    find_reason: Callable[[RowText, Any], str]
    measure: Callable[[RowText], float | str | None] = lambda row: None


class RuleGroup(NamedTuple):
    """Describes rules that one option of RowOptions switches on together.

    list_kinds: returns the kinds of the rules that are on, in their order. start: returns these
    rules; each work unit calls it.
    """

    option: str
    list_kinds: Callable[[RowOptions], list[str]]
    start: Callable[[RowOptions], list[BatchRule]]


class Column(NamedTuple):
    """Describes a column of the dataset with a value that a worker computes for each row.

    option: the field of RowOptions that switches the column on. kind: `string`, `int` or `float`.
    start: returns the function that computes the values of a batch; each work unit calls it.
    """

    option: str
    kind: str
    start: Callable[[RowOptions], Callable[[RowBatch], Sequence[Any]]]


class Sidecar(NamedTuple):
    """Describes a value that workers compute for each row and store beside the rows.

    width: bytes per row (0: it depends on the options). measure: called with the text of a row and
    the SHA-256 of its content; returns the value of the row as `width` bytes. measure_batch: if
    given, called with a batch instead; returns an array [rows, …].
    """

    width: int
    measure: Callable[[RowText, bytes], bytes] | None = None
    measure_batch: Callable[[RowBatch, RowOptions], np.ndarray] | None = None


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

    def find_numbers(self, *sidecars: np.ndarray) -> np.ndarray:
        """Return the kept row that each of n dropped rows duplicates (int64 [n]).

        The rows that `add` has kept are numbered from 0.
        """
        ...


class Decision(NamedTuple):
    """Describes a choice among all rows of a dataset, made from their sidecars in order.

    option: the field of RowOptions that switches the decision on. sidecars: names of the sidecars
    that the decision reads. start: returns the decider of a dataset, given the path of the
    decider's file. problem: kind of the line in errors.jsonl. reason: the end of its message "3
    train rows are …", or "1 train row is …".
    """

    option: str
    sidecars: tuple[str, ...]
    start: Callable[[Path], Decider]
    problem: str
    reason: str


class TwoPassDecision(NamedTuple):
    """Describes a choice that needs the sidecars of all rows, after the first pass over the input.

    The choice is on if `option` has `value`. If `value` is empty, it is on if the option does not
    have its default. Other fields: see Decision.
    """

    option: str
    value: str
    sidecars: tuple[str, ...]
    problem: str
    reason: str

    def is_on(self, row_options: RowOptions) -> bool:
        """Return whether a build makes this choice."""
        if self.value:
            return bool(getattr(row_options, self.option) == self.value)
        return _is_on(row_options, self.option)


def _find_short(row: RowText, min_chars: int) -> str:
    return "shorter than --min-chars" if row.characters < min_chars else ""


def _compute_keys(batch: RowBatch, row_options: RowOptions) -> np.ndarray:
    """Return the band keys (uint64 [rows, bands]); NO_KEY for a text too long to compare."""
    if all(map(_is_compared, batch.rows)):
        groups = batch.memo(WORDS, lambda rows: find_words(rows.texts))
    else:
        groups = find_words([row.text if _is_compared(row) else "" for row in batch.rows])
    bands = Bands(row_options.near_bands, row_options.near_band_size)
    return minhash.compute_keys(shingles.join_words(groups, row_options.near_words), bands)


def _is_compared(row: RowText) -> bool:
    return row.is_whole and row.characters <= MOST_CHARACTERS


# Key: the kind in errors.jsonl, which is also the name of the count in the manifest.
RULES: dict[str, Rule] = {"short": Rule("min_chars", _find_short, lambda row: row.characters)}

# In the order in which the rules apply, after those of RULES.
RULE_GROUPS: dict[str, RuleGroup] = {
    "language": RuleGroup("language", language.list_rules, language.start_rules),
    "quality": RuleGroup("quality", quality.list_rules, quality.start_rules),
    "quality model": RuleGroup("quality_score", scores.list_rules, scores.start_rules),
    "decontaminate": RuleGroup("decontaminate", lambda _: [matching.KIND], matching.start_rules),
}

# Key: the name of the column.
COLUMNS: dict[str, Column] = {
    language.COLUMN: Column(
        "language", "string", lambda row_options: partial(language.label_batch, row_options)
    ),
    scores.COLUMN: Column(
        "quality_model", "float", lambda row_options: partial(scores.score_batch, row_options)
    ),
}

# Key: the end of a file name, as in `train.digests`.
SIDECARS: dict[str, Sidecar] = {
    "digests": Sidecar(DIGEST_BYTES, lambda row, sha256: sha256[-DIGEST_BYTES:]),
    "keys": Sidecar(0, measure_batch=_compute_keys),
    "scores": Sidecar(4, measure_batch=scores.collect_scores),
    "sizes": Sidecar(8, lambda row, sha256: row.bytes.to_bytes(8, "little")),
    "positions": Sidecar(8, lambda row, sha256: row.position.to_bytes(8, "little")),
}

# Sidecars that every decision needs, to describe dropped rows in dropped.jsonl and in the report.
_EVERY_DECISION = {"positions", "sizes"}

# Key: the name of the count in the manifest.
DECISIONS: dict[str, Decision] = {
    "duplicates": Decision("dedup", ("digests",), DigestSet, "duplicate", "equal to an earlier row")
}

# Decisions that need the sidecars of all rows before they can select the first one. A build with
# one of them has two passes, and makes these decisions between them, in this order (near/build.py).
TWO_PASS_DECISIONS: dict[str, TwoPassDecision] = {
    "low_scores": TwoPassDecision(
        "keep_top", "", ("scores",), scores.KIND, "below the score of --keep-top"
    ),
    "near_duplicates": TwoPassDecision(
        "dedup",
        NEAR,
        ("digests", "keys"),
        "near duplicate",
        "similar to a kept row",
    ),
}


def _is_on(row_options: RowOptions, option: str) -> bool:
    field = next(field for field in dataclasses.fields(row_options) if field.name == option)
    return getattr(row_options, option) != declared.default_of(field)


def start_rules(row_options: RowOptions) -> list[BatchRule]:
    """Return the rules that are on, in their order."""
    single_rules = [
        BatchRule(kind, "", _check_rows(rule, getattr(row_options, rule.option)))
        for kind, rule in RULES.items()
        if _is_on(row_options, rule.option)
    ]
    groups = [group for group in RULE_GROUPS.values() if _is_on(row_options, group.option)]
    return single_rules + [rule for group in groups for rule in group.start(row_options)]


def _check_rows(rule: Rule, value: Any) -> Any:
    """Return a function that applies a rule to each row of a batch. value: value of its option."""
    import numpy as np

    def check(batch: RowBatch) -> RowVerdict:
        reasons = [rule.find_reason(row, value) for row in batch.rows]
        values = [
            rule.measure(row) if reason else None
            for row, reason in zip(batch.rows, reasons, strict=True)
        ]
        return RowVerdict(np.array([*map(bool, reasons)]), values, reasons)

    return check


def list_rules(row_options: RowOptions) -> dict[str, str]:
    """Return the option of each rule that is on, by its kind, in the order of application."""
    options = {
        kind: rule.option for kind, rule in RULES.items() if _is_on(row_options, rule.option)
    }
    groups = [group for group in RULE_GROUPS.values() if _is_on(row_options, group.option)]
    return options | {
        kind: group.option for group in groups for kind in group.list_kinds(row_options)
    }


def start_columns(row_options: RowOptions) -> dict[str, Callable[[RowBatch], Sequence[Any]]]:
    """Return the function that computes each column that is on."""
    return {name: COLUMNS[name].start(row_options) for name in list_columns(row_options)}


def list_columns(row_options: RowOptions) -> dict[str, str]:
    """Return the kind of each column that is on, by its name."""
    return {
        name: column.kind for name, column in COLUMNS.items() if _is_on(row_options, column.option)
    }


def drops_rows(row_options: RowOptions) -> bool:
    """Return whether any rule or decision is on."""
    return bool(
        list_rules(row_options)
        or list_decisions(row_options)
        or list_two_pass_decisions(row_options)
    )


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
        if decision.is_on(row_options)
    }


def list_sidecars(row_options: RowOptions) -> dict[str, Sidecar]:
    """Return the sidecars that the decisions need."""
    decisions: list[Decision | TwoPassDecision] = [
        *list_decisions(row_options).values(),
        *list_two_pass_decisions(row_options).values(),
    ]
    needed = {name for decision in decisions for name in decision.sidecars}
    needed |= _EVERY_DECISION if decisions else set()
    return {name: sidecar for name, sidecar in SIDECARS.items() if name in needed}


def list_decisions_on(row_options: RowOptions) -> list[str]:
    """Return the names of the decisions that can drop rows, including those that a plan makes."""
    return [
        name for name in list_counts(row_options) if _is_on(row_options, get_decision(name).option)
    ]


def get_decision(name: str) -> Decision | TwoPassDecision:
    """Return a decision of either table."""
    return DECISIONS.get(name) or TWO_PASS_DECISIONS[name]


def list_counts(row_options: RowOptions) -> list[str]:
    """Return the names of the decisions whose dropped rows the manifest counts.

    They are in the order of application: a two-pass decision whose option no other decision shares
    comes first.
    """
    shared = {decision.option for decision in DECISIONS.values()}
    two_pass = list_two_pass_decisions(row_options)
    first = [name for name, decision in two_pass.items() if decision.option not in shared]
    return [*first, *DECISIONS, *(name for name in two_pass if name not in first)]


def describe_dropped(row_options: RowOptions, counts: Mapping[str, int]) -> dict[str, str]:
    """Return the typed option of each rule or decision that dropped rows, by its kind."""
    decisions: dict[str, Decision | TwoPassDecision] = {**DECISIONS, **TWO_PASS_DECISIONS}
    options = {
        **list_rules(row_options),
        **{name: decision.option for name, decision in decisions.items()},
    }
    return {
        kind: spell_option(row_options, option)
        for kind, option in options.items()
        if counts.get(kind)
    }


def spell_option(row_options: RowOptions, name: str) -> str:
    """Return an option with its value, as typed. name: the field of RowOptions.

    Only the last part of a path is kept, so the report of a dataset does not depend on its place.
    """
    value = getattr(row_options, name)
    values = value if isinstance(value, list | tuple) else [value]
    texts = [item.name if isinstance(item, Path) else str(item) for item in values]
    return declared.flag(name) if value is True else f"{declared.flag(name)} {','.join(texts)}"
