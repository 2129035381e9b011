"""Contain everything that the page about a dataset shows.

Nothing here depends on the time, the machine, the number of workers or the place of the dataset, so
that equal datasets have equal pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.core import units
from lib.curate.near.minhash import Bands
from lib.curate.near.recall import Recall
from lib.curate.row_tally import DroppedSample, find_bin_start

HALF = 0.5  # a source that loses at least this share of its rows is reported


@dataclass(frozen=True)
class RuleFacts:
    """Describes what one rule or decision dropped.

    option: the option as typed. rows, bytes: size of the rows that it dropped, after the rules
    before it. alone: number of rows that it would drop if it were the only rule, None if unknown.
    is_least: whether `alone` is a lower limit.
    """

    name: str
    option: str
    rows: int
    bytes: int
    alone: int | None = None
    is_least: bool = False
    samples: Sequence[DroppedSample] = ()


@dataclass(frozen=True)
class SourceFacts:
    """Describes a top-level directory. dropped: number of dropped rows by rule."""

    name: str
    rows: int
    bytes: int
    dropped: Mapping[str, int]
    bytes_dropped: int

    @property
    def loss(self) -> float:
        """Return the share of the rows that were dropped."""
        return sum(self.dropped.values()) / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Cluster:
    """Describes a cluster of near duplicates: its size, and the kept row."""

    size: int
    place: str
    text: str


@dataclass(frozen=True)
class NearFacts:
    """Describes the search for near duplicates.

    recall: recall of each bin with pairs. above: recall of all pairs from the threshold on. counts:
    further counts as texts, by label.
    """

    bands: Bands
    threshold: float
    recall: Sequence[Recall]
    above: Recall | None
    counts: Mapping[str, str]
    clusters: Sequence[Cluster]


@dataclass(frozen=True)
class Section:
    """Describes a table about one option, such as the masked matches by kind.

    problems: sentences for the head of the page.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class CorpusFacts:
    """Describes a dataset.

    unit: the name of a row, `document` or `conversation`. rows, text_bytes: size of the input,
    including dropped rows. written: number of rows by split. lengths, lengths_kept: number of rows
    by the bin of their length, see row_tally.py. languages: number of rows and of dropped rows, by
    language. uncounted: number of work units from an earlier version, which lack figures of rows.
    parameters, versions, digests: texts by name.
    """

    unit: str
    files: int
    bytes: int
    documents: int
    rows: int
    text_bytes: int
    written: Mapping[str, int]
    written_bytes: int
    failed_files: int = 0
    uncounted: int = 0
    rules: Sequence[RuleFacts] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)
    lengths_kept: Mapping[int, int] = field(default_factory=dict)
    languages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sources: Sequence[SourceFacts] = ()
    near: NearFacts | None = None
    sections: Sequence[Section] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Return the number of rows that rules and decisions dropped."""
        return sum(rule.rows for rule in self.rules)

    def list_problems(self) -> list[str]:
        """Return the problems of the dataset, as sentences for the head of the page."""
        problems = []
        if self.uncounted:
            problems.append(
                f"An earlier version built {units.counted(self.uncounted, 'work unit')}; "
                "those rows are missing from the lengths, sources, languages and samples."
            )
        if self.failed_files:
            problems.append(
                f"{units.counted(self.failed_files, 'file')} failed; errors.jsonl lists them."
            )
        for source in self.sources:
            if source.loss > HALF:
                most = max(source.dropped, key=lambda name: source.dropped[name])
                problems.append(
                    f"{source.name} lost {format_share(source.loss)} of its "
                    f"{units.counted(source.rows, 'row')}, {source.dropped[most]:,} of them by "
                    f"{most}."
                )
        problems += [
            f"{rule.name} dropped {format_share(rule.rows / self.rows)} of all rows."
            for rule in self.rules
            if self.rows and rule.rows > HALF * self.rows
        ]
        return [*problems, *(text for section in self.sections for text in section.problems)]


def format_share(share: float) -> str:
    """Return a share as a percentage with one decimal: `12.5 %`."""
    return f"{100 * share:.1f} %"


def find_median_bin(lengths: Mapping[int, int]) -> tuple[float, float]:
    """Return the limits of the bin that contains the median length."""
    half = sum(lengths.values()) / 2
    seen = 0
    for number in sorted(lengths):
        seen += lengths[number]
        if seen >= half:
            return find_bin_start(number), find_bin_start(number + 1)
    return 0.0, 0.0
