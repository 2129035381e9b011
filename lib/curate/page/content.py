"""Compose the page about a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lib.core import units
from lib.curate.near.recall import ENOUGH
from lib.curate.page.facts import (
    HALF,
    CorpusFacts,
    NearFacts,
    RuleFacts,
    find_median_bin,
    format_share,
)
from lib.curate.row_tally import find_bin_start
from lib.pages.page import Html, escape, page, table, tag
from lib.pages.svg import COLUMNS, Line, draw_chart

LARGEST = 2_000_000  # bytes of a page
_SAMPLES = (10, 3, 0)  # samples of each rule; a page that is too large gets fewer
_SAMPLE_BYTES = 1000
_MOST_PROBLEMS = 20
_MOST_LANGUAGES = 80
_BAR = 120  # width in pixels of a bar for 100 %
_TITLE = "Corpus report"


def compose_page(facts: CorpusFacts) -> Html:
    """Return the page, of at most LARGEST bytes."""
    pages = (_compose_page(facts, samples) for samples in _SAMPLES)
    return next(text for text in pages if len(text.encode()) <= LARGEST)


def _compose_page(facts: CorpusFacts, samples: int) -> Html:
    share_kept = 1 - facts.dropped / facts.rows if facts.rows else 0.0
    lead = (
        f"The dataset contains {units.counted(sum(facts.written.values()), 'row')}, "
        f"{units.size(facts.written_bytes)} of text. {format_share(share_kept)} of the rows that "
        "were read were kept."
    )
    problems = facts.list_problems()
    more = len(problems) - _MOST_PROBLEMS
    items = [tag("li", text) for text in problems[:_MOST_PROBLEMS]]
    items += [tag("li", f"{more:,} more problems")] if more > 0 else []
    parts: list[object] = [
        tag("h1", _TITLE),
        tag("p", lead, class_="lead"),
        tag("dl", *_list_tiles(facts), class_="tiles"),
        tag("h2", "Problems"),
        tag("ul", *items) if items else tag("p", "None found."),
        *_show_rules(facts),
        *_show_lengths(facts),
        *_show_languages(facts),
        *_show_sources(facts),
        *(_show_near(facts.near) if facts.near else []),
    ]
    for section in facts.sections:
        shown = table(section.note, section.head, section.rows)
        parts += [tag("h2", section.title), shown]
    parts += _show_samples(facts.rules, samples)
    tables = {
        "Parameters": ("option", "value", facts.parameters),
        "Versions": ("package", "version", facts.versions),
        "Models and test sets": ("file", "digest", facts.digests),
    }
    for title, (name, value, content) in tables.items():
        if content:
            rows = list(content.items())
            parts += [tag("h2", title), table("", [name, value], rows)]
    return page(_TITLE, parts)


def _list_tiles(facts: CorpusFacts) -> list[Html]:
    figures = {
        "files": f"{facts.files:,}",
        "input": units.size(facts.bytes),
        f"{facts.unit}s": f"{facts.documents:,}",
        "rows read": f"{facts.rows:,}",
        "text read": units.size(facts.text_bytes),
        "rows dropped": f"{facts.dropped:,}",
        **{f"rows of {split}": f"{rows:,}" for split, rows in facts.written.items()},
        "text written": units.size(facts.written_bytes),
    }
    return [tag("div", tag("dt", name), tag("dd", text)) for name, text in figures.items()]


def _show_number(text: str) -> Html:
    """Return a number that stays on one line."""
    return tag("span", text, class_="number")


def _draw_bar(share: float) -> Html:
    """Return a bar that shows a number, hidden from screen readers."""
    width = round(_BAR * min(1.0, share), 1)
    shape = f'<g class="s0"><path class="area" d="M0,1h{width:g}v10h-{width:g}z"/></g>'
    return Html(
        f'<svg class="bar" aria-hidden="true" width="{_BAR}" height="12">'
        f"{shape if width else ''}</svg>"
    )


def _show_rules(facts: CorpusFacts) -> list[Html]:
    """Return the table of the rules, in the order of their application."""
    if not facts.rules:
        return [tag("h2", "Rules"), tag("p", "No option dropped rows.")]
    rows = []
    for rule in facts.rules:
        share = rule.rows / facts.rows if facts.rows else 0.0
        rows.append(
            [
                rule.name,
                rule.option,
                _show_number(f"{rule.rows:,}"),
                _show_number(format_share(share)),
                _draw_bar(share),
                _show_number(units.size(rule.bytes)),
                _show_number(_describe_alone(rule)),
            ]
        )
    caption = (
        "Rows that each rule dropped. A row counts for the first rule that drops it, in this "
        "order. Alone: rows that the rule would drop if it were the only one."
    )
    head = ["rule", "option", "dropped", "share", "", "text", "alone"]
    return [tag("h2", "Rules"), table(caption, head, rows)]


def _describe_alone(rule: RuleFacts) -> str:
    if rule.alone is None:
        return "not known"
    return f"{'at least ' if rule.is_least else ''}{rule.alone:,}"


def _show_lengths(facts: CorpusFacts) -> list[Html]:
    """Return the histogram of the lengths of rows, on a logarithmic axis."""
    if not facts.lengths:
        return []
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
    return [
        tag("h2", "Lengths"),
        _make_figure(chart, curves, caption, ["length", "read", "kept"], values),
    ]


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


def _make_figure(
    chart: Html,
    curves: Sequence[Line],
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> Html:
    """Return a chart with its legend, and a table with the same numbers."""
    legend = tag("p", *(curve.legend() for curve in curves), class_="legend")
    details = tag("details", tag("summary", f"Table: {caption}"), table(caption, head, rows))
    return tag("figure", tag("figcaption", caption, legend), chart, details, class_="wide fit")


def _show_languages(facts: CorpusFacts) -> list[Html]:
    if not facts.languages:
        return []
    ordered = sorted(facts.languages.items(), key=lambda item: (-item[1][0], item[0]))
    rows = []
    for name, (count, dropped) in ordered[:_MOST_LANGUAGES]:
        share = count / facts.rows if facts.rows else 0.0
        rows_kept = f"{count - dropped:,}"
        figures = [f"{count:,}", format_share(share), _draw_bar(share), rows_kept]
        rows.append([name, *map(_show_number, figures)])
    caption = f"Rows by language, {units.counted(len(ordered), 'language')}"
    return [
        tag("h2", "Languages"),
        table(caption, ["language", "read", "share", "", "kept"], rows),
    ]


def _show_sources(facts: CorpusFacts) -> list[Html]:
    if not facts.sources:
        return []
    rows = []
    for source in sorted(facts.sources, key=lambda source: (-source.rows, source.name)):
        dropped = sorted(source.dropped.items(), key=lambda item: (-item[1], item[0]))
        rules = ", ".join(f"{name} {count:,}" for name, count in dropped if count)
        mark = tag("strong", "lost over half", class_="mark") if source.loss > HALF else ""
        rows.append(
            [
                source.name,
                _show_number(f"{source.rows:,}"),
                _show_number(units.size(source.bytes)),
                _show_number(f"{source.rows - sum(source.dropped.values()):,}"),
                _show_number(units.size(source.bytes - source.bytes_dropped)),
                _show_number(format_share(source.loss)),
                mark,
                rules,
            ]
        )
    caption = "Top-level directories of the input; the one with the most rows first"
    head = ["source", "rows", "text", "kept", "text kept", "loss", "", "dropped by"]
    return [tag("h2", "Sources"), table(caption, head, rows)]


def _show_near(near: NearFacts) -> list[Html]:
    """Return the section on near duplicates: the curve, the recall and the largest clusters."""
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
    caption = f"{title}, by their Jaccard similarity"
    head = ["similarity", "sampled pairs", "formula", "measured"]
    clusters = [
        [
            f"{cluster.size:,}",
            cluster.place,
            tag("pre", escape(cluster.text, _SAMPLE_BYTES), dir="auto"),
        ]
        for cluster in near.clusters
    ]
    note = (
        "Formula: the recall for the similarities of the sampled pairs. Measured: estimated from "
        "the numbers of sampled pairs that share exactly one and exactly two bands (Chao's "
        "estimate of missed pairs). It assumes that every band finds a pair of a bin with the same "
        "probability; if not, the true recall is lower. Pairs below the threshold are compared "
        f"too, but kept. Bins with fewer than {ENOUGH} pairs are not estimated."
    )
    shown = [
        tag("h2", "Near duplicates"),
        table("", ["figure", "value"], list(near.counts.items())),
    ]
    shown += [
        _make_figure(chart, curves, caption, head, rows),
        tag("p", escape(note, 1000)),
    ]
    if clusters:
        caption = "The largest clusters: the beginning of the row that was kept"
        shown.append(table(caption, ["rows", "kept row", "text"], clusters))
    return shown


def _describe_recall(share: float | None) -> str:
    return "too few pairs" if share is None else format_share(share)


def _show_samples(rules: Sequence[RuleFacts], most: int) -> list[Html]:
    """Return samples of the rows that each rule dropped."""
    shown = []
    for rule in rules:
        rows = []
        for sample in rule.samples[:most]:
            text = tag("pre", escape(sample.text, _SAMPLE_BYTES), dir="auto")
            original = f"; duplicates {sample.kept}" if sample.kept else ""
            rows.append([f"{sample.path}, row {sample.position:,}{original}", sample.value, text])
        if rows:
            caption = f"Samples of {rule.rows:,} dropped rows, chosen by a hash of their place"
            head = ["place", "value", "beginning of the text"]
            shown += [tag("h3", rule.name), table(caption, head, rows)]
    return [tag("h2", "Samples of dropped rows"), *shown] if shown else []
