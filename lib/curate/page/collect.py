"""Collect the facts about a dataset that has been built, and write its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.core import declared, manifest, units
from lib.corpus import selection
from lib.corpus.dataset import DatasetWriter
from lib.corpus.dropped import format_place
from lib.corpus.extract.table import EXTRACTORS
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.tally import Tally
from lib.curate.classify import top_scores
from lib.curate.near.minhash import Bands
from lib.curate.near.plan import RULE_NAMES, RowPlan
from lib.curate.near.recall import estimate_recall
from lib.curate.page.facts import (
    HALF,
    Cluster,
    CorpusFacts,
    NearFacts,
    RuleFacts,
    Section,
    SourceFacts,
    find_median_bin,
    format_share,
)
from lib.curate.quality import rules as quality
from lib.curate.row_tally import RowTally

PAGE = "report.html"
_SHOWN_LANGUAGES = 5
_DIGESTS = ("sha256:", "xxh3:")
_SHOWN_SOURCES = 5


def write_page(directory: Path, facts: CorpusFacts) -> dict[str, Any]:
    """Write report.html into a dataset, and return its manifest entry."""
    from lib.curate.page.content import compose_page

    path = directory / PAGE
    manifest.write_text(path, compose_page(facts))
    return manifest.file_entry(directory, path)


def collect_facts(
    dataset: DatasetWriter,
    row_options: RowOptions,
    identity: Mapping[str, Any],
) -> CorpusFacts:
    """Return the facts about a dataset whose rows are all written.

    identity: of the dataset.
    """
    summary = dataset.summary()
    tally = dataset.tally
    counts = tally.row_counts
    lengths_kept = counts.lengths - counts.dropped_lengths  # a Counter leaves out counts of 0
    return CorpusFacts(
        unit="conversation" if row_options.format == CHAT else "document",
        files=identity["inputs"]["files"],
        bytes=identity["inputs"]["bytes"],
        documents=tally.documents,
        rows=counts.rows,
        text_bytes=counts.bytes,
        written=dataset.rows,
        written_bytes=summary["text_bytes"],
        failed_files=len(tally.failed),
        uncounted=counts.uncounted,
        rules=_list_rules(tally, dataset.dropped, row_options),
        lengths=counts.lengths,
        lengths_kept=lengths_kept,
        languages={
            name or "(none)": (count, counts.dropped_languages[name])
            for name, count in counts.languages.items()
        },
        sources=_list_sources(counts),
        near=_describe_near(dataset.plan, counts, row_options)
        if dataset.plan and row_options.drops_near
        else None,
        sections=_list_sections(dataset, row_options),
        parameters=_list_parameters(row_options),
        versions=manifest.package_versions(),
        digests=_list_digests(identity["options"]),
    )


def _list_rules(
    tally: Tally, decided: Mapping[str, int], row_options: RowOptions
) -> list[RuleFacts]:
    """Return the rules that are on, and then the decisions, in the order of application."""
    counts = tally.row_counts
    rules = [
        RuleFacts(
            kind,
            selection.spell_option(row_options, option),
            tally.dropped[kind],
            counts.dropped_bytes[kind],
            tally.alone[kind],
            samples=counts.samples.get(kind, ()),
        )
        for kind, option in selection.list_rules(row_options).items()
    ]
    has_rules = bool(rules)
    names = selection.list_decisions_on(row_options)
    planned = [*RULE_NAMES.values()] if row_options.has_two_passes else []
    names.sort(key=lambda name: planned.index(name) if name in planned else len(planned))
    for name in names:
        decision = selection.get_decision(name)
        # Every later row of equal content is a duplicate, so more rows never have fewer duplicates.
        is_exact = name in selection.DECISIONS
        rows = decided.get(name, 0)
        rules.append(
            RuleFacts(
                decision.problem,
                selection.spell_option(row_options, decision.option),
                rows,
                counts.dropped_bytes[decision.problem],
                rows if is_exact else None,
                has_rules,
                counts.samples.get(decision.problem, ()),
            )
        )
    return rules


def _list_sections(dataset: DatasetWriter, row_options: RowOptions) -> list[Section]:
    """Return the tables about options that change or compare texts."""
    sections = [*_describe_scores(dataset.plan, row_options)]
    if row_options.extract:
        sections.append(_describe_extraction(dataset.tally, row_options))
    if dataset.test_sets:
        sections.append(dataset.test_sets.make_section(dataset.tally.test_hits))
    return sections


def _describe_extraction(tally: Tally, row_options: RowOptions) -> Section:
    """Return a table of the documents whose text was extracted, and of the others by problem."""
    rows = []
    for kind in row_options.extract:
        problems = {
            name.partition(": ")[2]: count
            for name, count in sorted(tally.without_text.items())
            if name.startswith(f"{kind}: ")
        }
        reasons = ", ".join(f"{problem} {count:,}" for problem, count in problems.items())
        counts = f"{tally.extracted[kind]:,}", f"{sum(problems.values()):,}"
        rows.append([EXTRACTORS[kind].label, *counts, reasons])
    note = (
        "Documents whose text was extracted, and documents that gave no text. errors.jsonl lists "
        "those without text. Some pages or chapters of an extracted document may be missing."
    )
    return Section("Extraction", note, ["kind", "extracted", "without text", "problems"], rows)


def _list_sources(counts: RowTally) -> list[SourceFacts]:
    return [
        SourceFacts(
            source["name"],
            source["rows"],
            source["bytes"],
            source["dropped"],
            source["dropped_bytes"],
        )
        for source in counts.list_sources()
    ]


def _describe_near(plan: RowPlan, counts: RowTally, row_options: RowOptions) -> NearFacts:
    summary = plan.summary["near"]
    bands = Bands(row_options.near_bands, row_options.near_band_size)
    threshold = row_options.near_threshold
    bins, above = estimate_recall(plan.recall, bands, threshold)
    labels = {
        "rows": "rows",
        "earlier_rows": "rows of earlier datasets",
        "not_compared": "rows without words, or too long to be compared",
        "sharing_a_band": "rows that share a band with another row",
        "compared_pairs": "pairs whose similarity was computed",
        "candidates_reached": f"rows with more than {row_options.near_candidates} candidates",
        "members_reached": f"times that a band had {row_options.near_members:,} kept rows already",
    }
    clusters = [
        Cluster(size, format_place(plan.describe_row(row)), counts.excerpts.get(str(row), ""))
        for size, row in plan.largest
    ]
    figures = {label: f"{summary[name]:,}" for name, label in labels.items()}
    return NearFacts(bands, threshold, bins, above, figures, clusters)


def _describe_scores(plan: RowPlan | None, row_options: RowOptions) -> list[Section]:
    """Return a table of the scores if --keep-top selects rows, otherwise nothing."""
    if plan is None or row_options.keep_top is None:
        return []
    top = plan.summary["quality"]
    note = (
        f"Scores of the {top['rows']:,} rows that no rule has dropped. The {top['kept']:,} rows "
        f"with the highest scores were kept; the lowest kept score is {top['score']:.6g}."
    )
    width = 1 / top_scores.BINS
    rows = [
        (f"{number * width:.2f} to {(number + 1) * width:.2f}", f"{count:,}")
        for number, count in enumerate(top["bins"])
    ]
    return [Section("Quality scores", note, ["score", "rows"], rows)]


def _list_parameters(row_options: RowOptions) -> dict[str, str]:
    """Return the options and thresholds that decide which rows are kept, without paths."""
    shown = {}
    for field in declared.list_fields(RowOptions):
        value = getattr(row_options, field.name)
        is_default = value == declared.default_of(field)
        is_near = field.name.startswith("near_") and row_options.drops_near
        if is_near or not (is_default and field.metadata["quiet"]):
            shown[declared.flag(field.name)] = _format_option(value)
    return shown | quality.describe_quality(row_options)


def _format_option(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_option, value)) or "none"
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return "none" if value is None else str(value)


def _list_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that options name, from the identity of a dataset."""
    digests: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, str) and value.startswith(_DIGESTS):
            digests[declared.flag(name)] = value
        elif isinstance(value, dict):
            digests |= {
                f"{declared.flag(name)}: {key}": str(digest) for key, digest in value.items()
            }
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict) and "name" in item:
                    rest = {key: item[key] for key in item if key != "name"}
                    label = f"{declared.flag(name)}: {item['name']}"
                    digests[label] = ", ".join(map(str, rest.values()))
    return digests


def format_lines(facts: CorpusFacts, save_dir: Path) -> dict[str, str]:
    """Return the lines about a dataset that stage 02 prints in addition to its summary."""
    lines = {}
    alone = [
        f"{rule.name} {rule.alone:,}"
        for rule in facts.rules
        if rule.alone is not None and not rule.is_least and rule.alone != rule.rows
    ]
    if alone:
        lines["alone"] = f"{', '.join(alone)} rows, if each were the only rule"
    if facts.lengths:
        low, high = find_median_bin(facts.lengths)
        lines["lengths"] = f"the median row has {units.size(low)} to {units.size(high)}"
    if facts.languages:
        ordered = sorted(facts.languages.items(), key=lambda item: (-item[1][0], item[0]))
        shares = [
            f"{name} {format_share(count / facts.rows)}"
            for name, (count, _) in ordered[:_SHOWN_LANGUAGES]
        ]
        rest = len(ordered) - len(shares)
        lines["languages"] = ", ".join(shares) + (f" and {rest} more" if rest else "")
    if facts.near and facts.near.above and facts.near.above.measured is not None:
        above = facts.near.above
        lines["recall"] = (
            f"the bands found {format_share(above.measured or 0)} of the pairs at "
            f"{facts.near.threshold:g} and above (estimated from {above.pairs:,} pairs; "
            f"{format_share(above.expected)} by the formula)"
        )
    lost = sorted(
        (source for source in facts.sources if source.loss > HALF), key=lambda source: -source.rows
    )
    if lost:
        names = [f"{source.name} ({format_share(source.loss)})" for source in lost]
        lines["lost over half"] = units.join_names(names, _SHOWN_SOURCES)
    lines["report"] = f"{save_dir / PAGE} shows all figures, with samples of the dropped rows"
    return lines
