"""Show what a search for near duplicates has found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lib.core import units
from lib.curate.near.minhash import CURVE, Bands
from lib.curate.near.recall import ENOUGH, Recall, estimate_recall
from lib.curate.places import describe_place
from lib.curate.step import Section

_LABELS = {
    "rows": "rows",
    "earlier_rows": "rows of earlier datasets",
    "not_compared": "rows without words, or too long to be compared",
    "documents": "rows that share a band with another row",
    "compared": "pairs whose similarity was computed",
    "candidates_reached": "rows with more candidates than --near-candidates",
    "members_reached": "times that a band had --near-members kept rows already",
}
_RECALL_NOTE = (
    "Formula: the recall for the similarities of the sampled pairs. Measured: estimated from the "
    "numbers of sampled pairs that share exactly one and exactly two bands (Chao's estimate of "
    "missed pairs). It assumes that every band finds a pair of a bin with the same probability; if "
    "not, the true recall is lower. Pairs below the threshold are compared too, but kept. Bins "
    f"with fewer than {ENOUGH} pairs are not estimated."
)


def summarize(figures: Mapping[str, Any], bands: Bands, threshold: float) -> dict[str, Any]:
    """Return the figures of a search for the manifest."""
    bins, above = estimate_recall(figures["recall"], bands, threshold)
    return {
        "probability": {
            f"{similarity:g}": round(bands.find_probability(similarity), 4) for similarity in CURVE
        },
        "rows": figures["rows"],
        "earlier_rows": figures["earlier_rows"],
        "not_compared": figures["not_compared"],
        "sharing_a_band": figures["documents"],
        "compared_pairs": figures["compared"],
        "candidates_reached": figures["candidates_reached"],
        "members_reached": figures["members_reached"],
        "recall": [row.summarize() for row in (*bins, *([above] if above else ()))],
        "largest": [{"size": size, **place} for size, _, place in figures["largest"]],
    }


def list_sections(figures: Mapping[str, Any], bands: Bands, threshold: float) -> Iterator[Section]:
    """Yield the tables of the report. figures: of the search."""
    counts = [(label, f"{figures[name]:,}") for name, label in _LABELS.items()]
    yield Section("Near duplicates", "", ["figure", "value"], counts)
    bins, above = estimate_recall(figures["recall"], bands, threshold)
    rows = [(f"{row.similarity:.2f} to {row.similarity + 0.05:.2f}", row) for row in bins]
    if above:
        rows.append((f"all from {threshold:g} on", above))
    yield Section(
        "Recall by Jaccard similarity",
        _RECALL_NOTE,
        ["similarity", "sampled pairs", "formula", "measured"],
        [
            [name, f"{row.pairs:,}", _format_share(row.expected), _format_measured(row)]
            for name, row in rows
        ],
    )
    if figures["largest"]:
        excerpts = figures.get("excerpts", {})
        yield Section(
            "Largest clusters",
            "The beginning of the row that was kept.",
            ["rows", "kept row", "text"],
            [
                [f"{size:,}", describe_place(place), excerpts.get(str(row), "")]
                for size, row, place in figures["largest"]
            ],
        )


def format_lines(figures: Mapping[str, Any], bands: Bands, threshold: float) -> dict[str, str]:
    """Return the lines of the printed summary by label."""
    lines = {
        "compared": f"{units.counted(figures['compared'], 'pair')} exactly; "
        f"{units.counted(figures['documents'], 'row')} share a band with another row, "
        f"{figures['not_compared']:,} have no words or are too long",
        "caps": f"{units.counted(figures['candidates_reached'], 'row')} had more candidates than "
        f"--near-candidates; a band value reached --near-members "
        f"{units.counted(figures['members_reached'], 'time')}",
    }
    _, above = estimate_recall(figures["recall"], bands, threshold)
    if above and above.measured is not None:
        lines["recall"] = (
            f"the bands found {_format_share(above.measured)} of the pairs at {threshold:g} and "
            f"above (estimated from {above.pairs:,} pairs; {_format_share(above.expected)} by the "
            "formula)"
        )
    return lines


def _format_measured(row: Recall) -> str:
    return "too few pairs" if row.measured is None else _format_share(row.measured)


def _format_share(share: float) -> str:
    return f"{100 * share:.1f} %"
