"""Facts for the page about a dataset, without a dataset."""

from __future__ import annotations

import math

from lib.curate.near.minhash import Bands
from lib.curate.near.recall import Recall
from lib.curate.page.facts import (
    Cluster,
    CorpusFacts,
    NearFacts,
    RuleFacts,
    Section,
    SourceFacts,
)
from lib.curate.row_tally import DroppedSample


def make_facts(text: str = "Once upon a time there was a row.", samples: int = 10) -> CorpusFacts:
    """Return facts with every section. text: the text of all samples, names and clusters."""
    shown = [
        DroppedSample(n, f"web/{text}.jsonl", n, f"{n / 10:g}", text, "a.txt, row 2")
        for n in range(10)
    ]
    rules = [
        RuleFacts("short", "--min-chars 200", 120_000, 9_000_000, 120_000, samples=shown[:samples]),
        RuleFacts("gopher: stop words", "--quality gopher", 30_000, 70_000_000, 90_000),
        RuleFacts("duplicate", "--dedup near", 50_000, 150_000_000, 50_000, True),
        RuleFacts("near duplicate", "--dedup near", 45_000, 140_000_000, samples=shown[:samples]),
    ]
    lengths = {n: int(150_000 * math.exp(-((n - 17) ** 2) / 18)) for n in range(6, 31)}
    bins = [Recall(n / 20, 40 * n, 1 - 1 / n**2, 1 - 1.1 / n**2) for n in range(10, 20)]
    near = NearFacts(
        Bands(20, 8),
        0.8,
        [bins[0]._replace(measured=None), *bins[1:]],
        Recall(0.8, 2960, 0.993, 0.991),
        {"compared pairs": "123,456"},
        [Cluster(size, f"web/{size}.html, row 1", text) for size in (12_000, 310, 2)],
    )
    return CorpusFacts(
        "document",
        files=1234,
        bytes=4_100_000_000,
        documents=990_000,
        rows=990_000,
        text_bytes=3_900_000_000,
        written={"train": 737_000, "validation": 8_000},
        written_bytes=3_531_000_000,
        failed_files=2,
        rules=rules,
        lengths=lengths,
        lengths_kept={n: int(0.75 * count) for n, count in lengths.items()},
        languages={"en": (700_000, 150_000), "de": (200_000, 60_000), "und": (90_000, 35_000)},
        sources=[
            SourceFacts("web", 800_000, 3_000_000_000, {"short": 90_000}, 300_000_000),
            SourceFacts(text, 1000, 900_000_000, {"near duplicate": 600, "short": 3}, 500_000),
        ],
        near=near,
        sections=[Section("Masks", "Matches by kind", ["kind", "matches"], [["email", "1,234"]])],
        parameters={"--dedup": "near", "--min-chars": "200"},
        versions={"python": "3.11.7", "pyarrow": "22.0.0"},
        digests={"lid.176.ftz": "sha256:8f3472cfe8738a7b6099e8e999c3cbfa"},
    )
