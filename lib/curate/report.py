"""Write report.html, the page about a curated dataset.

Nothing on the page depends on the time, the machine, the number of workers or the place of the
dataset, so that equal datasets have equal pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from lib.core import declared, manifest, units
from lib.curate.row_tally import DroppedSample, RowTally, find_bin_start
from lib.curate.step import Section
from lib.pages.page import render_template
from lib.pages.svg import COLUMNS, Line, draw_chart

PAGE = "report.html"
LARGEST = 2_000_000  # bytes of a page
_HALF = 0.5  # a source or rule that drops at least this share of its rows is a problem
_SAMPLES = (10, 3, 0)  # samples of each rule; a page that is too large gets fewer
_SAMPLE_BYTES = 1000
_MOST_PROBLEMS = 20
_MOST_LANGUAGES = 80
_SHOWN_LANGUAGES = 5
_SHOWN_SOURCES = 5


class RuleFacts(NamedTuple):
    """Describes what one rule dropped.

    option: the option as typed. rows, bytes: size of the rows that it dropped, after the rules
    before it. alone: number of rows that it would drop if it were the only rule; None for a rule
    that needs the whole dataset.
    """

    name: str
    option: str
    rows: int
    bytes: int
    alone: int | None
    samples: Sequence[DroppedSample]


class SourceFacts(NamedTuple):
    """Describes a top-level directory of the sources. dropped: number of dropped rows by rule."""

    name: str
    rows: int
    bytes: int
    dropped: Mapping[str, int]
    dropped_bytes: int

    @property
    def loss(self) -> float:
        """Return the share of the rows that were dropped."""
        return sum(self.dropped.values()) / self.rows if self.rows else 0.0

    @property
    def reasons(self) -> str:
        """Return the rules that dropped rows, the one with the most rows first."""
        ordered = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{name} {count:,}" for name, count in ordered if count)


@dataclass(frozen=True)
class CurationFacts:
    """Contains everything that the page shows.

    tally: of all rows that were read. rules: in their order. written: number of rows by split.
    sections: of the steps. parameters: identity of the steps.
    """

    tally: RowTally
    rules: Sequence[RuleFacts]
    written: Mapping[str, int]
    written_bytes: int
    sections: Sequence[Section]
    parameters: Mapping[str, Any]

    @property
    def dropped(self) -> int:
        """Return the number of rows that rules dropped."""
        return sum(rule.rows for rule in self.rules)

    def list_sources(self) -> list[SourceFacts]:
        """Return the sources, the one with the most rows first."""
        found = [SourceFacts(**source) for source in self.tally.list_sources()]
        return sorted(found, key=lambda source: (-source.rows, source.name))

    def list_languages(self) -> list[tuple[str, int, int]]:
        """Return the number of rows and of kept rows of each language, the largest first."""
        lost = self.tally.dropped_languages
        found = [
            (name or "(none)", count, count - lost[name])
            for name, count in self.tally.languages.items()
        ]
        return sorted(found, key=lambda language: (-language[1], language[0]))

    def list_problems(self) -> list[str]:
        """Return the problems of the dataset, as sentences for the head of the page."""
        problems = []
        for source in self.list_sources():
            if source.loss > _HALF:
                most = max(source.dropped, key=lambda name: source.dropped[name])
                problems.append(
                    f"{source.name} lost {format_share(source.loss)} of its "
                    f"{units.counted(source.rows, 'row')}, {source.dropped[most]:,} of them by "
                    f"{most}."
                )
        problems += [
            f"{rule.name} dropped {format_share(rule.rows / self.tally.rows)} of all rows."
            for rule in self.rules
            if rule.rows > _HALF * self.tally.rows
        ]
        return [*problems, *(text for section in self.sections for text in section.problems)]


class ChartWithTable(NamedTuple):
    """Describes a chart, and a table with the same numbers."""

    chart: Markup
    curves: Sequence[Line]
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(directory: Path, facts: CurationFacts) -> Path:
    """Write report.html into a dataset, and return its path."""
    path = directory / PAGE
    pages = (compose_page(facts, samples) for samples in _SAMPLES)
    manifest.write_text(path, next(text for text in pages if len(text.encode()) <= LARGEST))
    return path


def compose_page(facts: CurationFacts, samples: int) -> str:
    """Return the page. samples: the most samples of each rule."""
    tally = facts.tally
    share_kept = 1 - facts.dropped / tally.rows if tally.rows else 0.0
    languages = facts.list_languages()
    return render_template(
        "curate/report.html.j2",
        title="Curation report",
        lead=f"The dataset contains {units.counted(sum(facts.written.values()), 'row')}, "
        f"{units.size(facts.written_bytes)} of text. {format_share(share_kept)} of the rows that "
        "were read were kept.",
        facts=facts,
        tiles={
            "rows read": f"{tally.rows:,}",
            "text read": units.size(tally.bytes),
            "rows dropped": f"{facts.dropped:,}",
            **{f"rows of {split}": f"{rows:,}" for split, rows in facts.written.items()},
            "text written": units.size(facts.written_bytes),
        },
        problems=facts.list_problems(),
        most_problems=_MOST_PROBLEMS,
        lengths=_draw_lengths(tally) if tally.lengths else None,
        languages=languages[:_MOST_LANGUAGES],
        language_count=units.counted(len(languages), "language"),
        sources=facts.list_sources(),
        half=_HALF,
        sampled=[rule for rule in facts.rules if rule.samples[:samples]],
        samples=samples,
        sample_bytes=_SAMPLE_BYTES,
        parameters=dict(_list_parameters(facts.parameters)),
        versions=manifest.package_versions(),
        share=format_share,
    )


def format_lines(facts: CurationFacts, save_dir: Path) -> dict[str, str]:
    """Return the lines of the printed summary by label."""
    tally = facts.tally
    *others, (split, count) = facts.written.items()
    rows = ", ".join(
        [*(f"{rows:,} {name}" for name, rows in others), units.counted(count, f"{split} row")]
    )
    lines = {
        "in": f"{units.counted(tally.rows, 'row')}, {units.size(tally.bytes)} of text",
        "out": f"{rows}, {units.size(facts.written_bytes)} of text",
    }
    for rule in facts.rules:
        if rule.rows or rule.alone:
            alone = f"; alone {rule.alone:,}" if rule.alone not in (None, rule.rows) else ""
            dropped = units.counted(rule.rows, "row")
            lines[rule.name] = f"{dropped} dropped by {rule.option}{alone}"
    if languages := facts.list_languages():
        shares = [
            f"{name} {format_share(count / tally.rows)}"
            for name, count, _ in languages[:_SHOWN_LANGUAGES]
        ]
        rest = len(languages) - len(shares)
        lines["languages"] = ", ".join(shares) + (f" and {rest} more" if rest > 0 else "")
    if lost := [source for source in facts.list_sources() if source.loss > _HALF]:
        names = [f"{source.name} ({format_share(source.loss)})" for source in lost]
        lines["lost over half"] = units.join_names(names, _SHOWN_SOURCES)
    lines["report"] = f"{save_dir / PAGE} shows all figures, with samples of the dropped rows"
    return lines


def _draw_lengths(tally: RowTally) -> ChartWithTable:
    """Return the histogram of the lengths of rows, on a logarithmic axis."""
    lengths = tally.lengths
    kept_lengths = lengths - tally.dropped_lengths  # a Counter leaves out counts of 0
    first = min(lengths) // 5 * 5
    bins = max(lengths) + 1 - first
    curves = [
        _make_histogram("read", lengths, first, bins, 0, "area"),
        _make_histogram("kept", kept_lengths, first, bins, 1, ""),
    ]
    # The axis ends just before the end of the last bin, where a label would be cut off.
    rows: list[tuple[str, Callable[[float], str]]] = [
        ("", lambda tick: units.size(find_bin_start(first + tick)))
    ]
    chart = draw_chart("lengths", "Lengths of rows", "rows", "wide zero", curves, bins - 0.01, rows)
    values = [
        [
            f"{units.size(find_bin_start(number))} to {units.size(find_bin_start(number + 1))}",
            f"{lengths[number]:,}",
            f"{kept_lengths[number]:,}",
        ]
        for number in range(first, first + bins)
        if lengths[number]
    ]
    caption = "Rows by the bytes of their text"
    return ChartWithTable(chart, curves, caption, ["length", "read", "kept"], values)


def _make_histogram(
    label: str, lengths: Mapping[int, int], first: int, bins: int, style: int, form: str
) -> Line:
    numbers = np.arange(COLUMNS) * bins // COLUMNS + first
    high = np.array([lengths.get(int(number), 0) for number in numbers], float)
    low, above = find_median_bin(lengths)
    figures = {"rows": f"{sum(lengths.values()):,}"}
    if lengths:
        figures["median"] = f"between {units.size(low)} and {units.size(above)}"
    return Line(
        label,
        np.zeros(COLUMNS) if form == "area" else high,
        high,
        np.zeros(COLUMNS, bool),
        figures,
        style,
        form,
    )


def _list_parameters(identity: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options of the steps and their values, and the digests of the files they name."""
    for name, value in identity.items():
        flag = declared.flag(name)
        if isinstance(value, dict):
            for key, part in value.items():
                yield f"{flag}: {key}", _format_value(part)
        else:
            yield flag, _format_value(value)


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value)) or "none"
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    return "none" if value is None else str(value)


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
