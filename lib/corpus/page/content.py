"""Compose the page about a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from lib.core import units
from lib.corpus.near.recall import ENOUGH
from lib.corpus.page.facts import (
    HALF,
    CorpusFacts,
    NearFacts,
    SourceFacts,
    find_median_bin,
    format_share,
)
from lib.corpus.row_tally import find_bin_start
from lib.pages.page import render_template
from lib.pages.svg import COLUMNS, Line, draw_chart

LARGEST = 2_000_000  # bytes of a page
_SAMPLES = (10, 3, 0)  # samples of each rule; a page that is too large gets fewer
_SAMPLE_BYTES = 1000
_MOST_PROBLEMS = 20
_MOST_LANGUAGES = 80


class ChartWithTable(NamedTuple):
    """Describes a chart, and a table with the same numbers."""

    chart: Markup
    curves: Sequence[Line]
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def compose_page(facts: CorpusFacts) -> str:
    """Return the page, of at most LARGEST bytes."""
    pages = (_compose_page(facts, samples) for samples in _SAMPLES)
    return next(text for text in pages if len(text.encode()) <= LARGEST)


def _compose_page(facts: CorpusFacts, samples: int) -> str:
    share_kept = 1 - facts.dropped / facts.rows if facts.rows else 0.0
    lead = (
        f"The dataset contains {units.counted(sum(facts.written.values()), 'row')}, "
        f"{units.size(facts.written_bytes)} of text. {format_share(share_kept)} of the rows that "
        "were read were kept."
    )
    languages = [(name, *counts) for name, counts in facts.languages.items()]
    languages.sort(key=lambda language: (-language[1], language[0]))
    return render_template(
        "corpus/page/report.html.j2",
        title="Corpus report",
        lead=lead,
        facts=facts,
        tiles=_list_tiles(facts),
        problems=facts.list_problems(),
        most_problems=_MOST_PROBLEMS,
        lengths=_draw_lengths(facts) if facts.lengths else None,
        languages=languages[:_MOST_LANGUAGES],
        language_count=units.counted(len(languages), "language"),
        sources=sorted(facts.sources, key=lambda source: (-source.rows, source.name)),
        half=HALF,
        list_rules=_list_rules,
        recall=_draw_recall(facts.near) if facts.near else None,
        least_pairs=ENOUGH,
        sampled=[rule for rule in facts.rules if rule.samples[:samples]],
        samples=samples,
        sample_bytes=_SAMPLE_BYTES,
        share=format_share,
    )


def _list_tiles(facts: CorpusFacts) -> dict[str, str]:
    return {
        "files": f"{facts.files:,}",
        "input": units.size(facts.bytes),
        f"{facts.unit}s": f"{facts.documents:,}",
        "rows read": f"{facts.rows:,}",
        "text read": units.size(facts.text_bytes),
        "rows dropped": f"{facts.dropped:,}",
        **{f"rows of {split}": f"{rows:,}" for split, rows in facts.written.items()},
        "text written": units.size(facts.written_bytes),
    }


def _list_rules(source: SourceFacts) -> str:
    """Return the rules that dropped rows of a source, the one with the most rows first."""
    dropped = sorted(source.dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in dropped if count)


def _draw_lengths(facts: CorpusFacts) -> ChartWithTable:
    """Return the histogram of the lengths of rows, on a logarithmic axis."""
    first = min(facts.lengths) // 5 * 5
    bins = max(facts.lengths) + 1 - first
    curves = [
        _make_histogram("read", facts.lengths, first, bins, 0, "area"),
        _make_histogram("kept", facts.lengths_kept, first, bins, 1, ""),
    ]
    # The axis ends just before the end of the last bin, where a label would be cut off.
    rows: list[tuple[str, Callable[[float], str]]] = [
        ("", lambda tick: units.size(find_bin_start(first + tick)))
    ]
    chart = draw_chart("lengths", "Lengths of rows", "rows", "wide zero", curves, bins - 0.01, rows)
    values = [
        [
            f"{units.size(find_bin_start(number))} to {units.size(find_bin_start(number + 1))}",
            f"{facts.lengths.get(number, 0):,}",
            f"{facts.lengths_kept.get(number, 0):,}",
        ]
        for number in range(first, first + bins)
        if facts.lengths.get(number) or facts.lengths_kept.get(number)
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


def _draw_recall(near: NearFacts) -> ChartWithTable:
    """Return the probability that the bands find a pair, by formula and as measured."""
    centres = (np.arange(COLUMNS) + 0.5) / COLUMNS
    formula = np.array([near.bands.find_probability(float(centre)) for centre in centres])
    gaps = np.zeros(COLUMNS, bool)
    curves = [Line("formula", formula, formula, gaps, {"bands": str(near.bands.number)})]
    measured = {row.similarity: row.measured for row in near.recall if row.measured is not None}
    if measured:
        low = np.full(COLUMNS, np.inf)
        for similarity, share in measured.items():
            low[int((similarity + 0.025) * COLUMNS)] = share
        high = np.where(np.isfinite(low), low, -np.inf)
        texts = {f"from {least:g}": format_share(share) for least, share in measured.items()}
        curves.append(Line("measured", low, high, gaps, texts, 1, "marked"))
    labels: list[tuple[str, Callable[[float], str]]] = [("Jaccard", lambda tick: f"{tick:g}")]
    title = "Probability that a pair of rows is compared"
    chart = draw_chart("recall", title, "probability", "wide zero", curves, 1.0, labels)
    bins = [(f"{row.similarity:.2f} to {row.similarity + 0.05:.2f}", row) for row in near.recall]
    if near.above:
        bins.append((f"all from {near.threshold:g} on", near.above))
    rows = [
        [name, f"{row.pairs:,}", format_share(row.expected), _describe_recall(row.measured)]
        for name, row in bins
    ]
    head = ["similarity", "sampled pairs", "formula", "measured"]
    return ChartWithTable(chart, curves, f"{title}, by their Jaccard similarity", head, rows)


def _describe_recall(share: float | None) -> str:
    return "too few pairs" if share is None else format_share(share)
