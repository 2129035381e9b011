# covers: lib/curate/report.py, lib/curate/report.html.j2, lib/curate/sample.py
# covers: lib/curate/row_texts.py, lib/curate/row_tally.py
"""The report of a curation shows what each rule dropped, and hostile texts do nothing on it."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from lib.curate import report
from lib.curate.report import CurationFacts, RuleFacts, compose_page
from lib.curate.row_tally import DroppedSample, RowTally
from lib.curate.step import Section
from tests.curate.curations import curate, curate_in_units, read_dropped, write_texts
from tests.curate.test_duplicates import change_words, make_words
from tests.pages.test_svg import HOSTILE, check_page
from tests.training import read_dataset_files

_FILTER = """
NAME = "too short"

def find_reason(text):
    return f"{len(text)} characters" if len(text) < 30 else ""
"""
_OPTIONS = ("--dedup", "near", "--step", "filter.py", "--mask", "email")


def make_facts(text: str = "Once upon a time there was a row.", rules: int = 2) -> CurationFacts:
    """Return facts with every section. text: the text of all samples and names."""
    samples = [
        DroppedSample(n, f"web/{text}.jsonl", n, f"value {n}.", text, "train row 2")
        for n in range(10)
    ]
    tally = RowTally(990_000, 3_900_000_000)
    tally.lengths = Counter({n: int(150_000 * math.exp(-((n - 17) ** 2) / 18)) for n in range(31)})
    tally.dropped_lengths = Counter({n: count // 4 for n, count in tally.lengths.items()})
    tally.languages = Counter({"en": 700_000, "de": 200_000, "und": 90_000})
    tally.sources = {
        "web": Counter({"rows": 800_000, "bytes": 3_000_000_000, "dropped: short": 90_000}),
        text: Counter({"rows": 1000, "bytes": 900_000_000, "dropped: near duplicate": 603}),
    }
    return CurationFacts(
        tally,
        [
            *(
                RuleFacts(f"rule {n}", text, 120_000, 9_000_000, 150_000, samples)
                for n in range(rules)
            ),
            RuleFacts("near duplicate", "--dedup near", 5_000, 140_000_000, None, ()),
        ],
        {"validation": 8_000, "train": 737_000},
        3_531_000_000,
        [Section("Masks", text, ["kind", "matches"], [["email", "12"]], ["A problem."])],
        {"quality": ["gopher"], "near_against": [], "step": {"my rule": "xxh3:12"}},
    )


def test_the_page_shows_every_section_and_marks_a_source_that_lost_half() -> None:
    parsed = check_page(compose_page(make_facts(), 10))
    for text in (
        "contains 745,000 rows, 3.5 GB of text",
        "lost 60.3 % of its 1,000 rows, 603 of them by near duplicate",
        "lost over half",
        "A problem.",
        "150,000",
        "Rows by language, 3 languages",
        "duplicates train row 2",
        "--quality\ngopher",
        "--step: my rule",
    ):
        assert text in parsed.text, text
    assert parsed.text.count("Samples of ") == 2 + 1


def test_hostile_texts_are_shown_and_do_nothing() -> None:
    parsed = check_page(compose_page(make_facts(HOSTILE + "\0"), 10))
    assert parsed.text.count("<script>alert(1)</script>\\u202e\\x1b[31m\\ud800&\"'\\x00") > 40


def test_the_page_of_a_tiny_dataset_is_well_formed() -> None:
    tiny = CurationFacts(RowTally(), [], {"train": 0}, 0, [], {})
    assert "No option dropped rows." in check_page(compose_page(tiny, 10)).text
    tally = RowTally(1, 9, Counter({0: 1}))
    rules = [RuleFacts("short", "--step short.py", 1, 0, 1, ())]
    text = check_page(compose_page(dataclasses.replace(tiny, tally=tally, rules=rules), 10)).text
    assert "short dropped 100.0 %" in text


def test_a_page_of_many_rules_and_sources_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\u202e€𝄞" * 66
    facts = make_facts(text, rules=60)
    for number in range(1000):
        counts = Counter({"rows": 9, "bytes": 9, "dropped: rule 1": 9})
        facts.tally.sources[f"{number} {text}"] = counts
    page = report.write_page(tmp_path, facts).read_text()
    assert len(page.encode()) <= report.LARGEST
    parsed = check_page(page)
    assert "more problems" in parsed.text and "first 80 of 1,002 lines" in parsed.text
    assert parsed.text.count("value 9.") == 60
    monkeypatch.setattr(report, "LARGEST", len(page.encode()) - 1)
    text = check_page(report.write_page(tmp_path, facts).read_text()).text
    assert "value 9." not in text and text.count("value 2.") == 60


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return a dataset of two sources; most rows of one are similar or short, some hostile."""
    draw = random.Random(0)
    bases = [make_words(draw, 80) for _ in range(12)]
    copies = [
        f"{HOSTILE[:40]} " + " ".join(change_words(draw, base, draw.choice([0, 0, 1, 2])))
        for base in bases
        for _ in range(draw.randint(1, 9))
    ]
    draw.shuffle(copies)
    copies += ["short", "t@firma-berg.de"]
    own_texts = [" ".join(make_words(draw, 50)) for _ in range(30)]
    own_texts.append("a row of a file in no directory, written by anna@firma-berg.de")
    texts = [text.encode("utf-8", "replace").decode() for text in (*copies, *own_texts)]
    sources = [f"mirror/{n % 4}" for n in range(len(copies))]
    sources += [f"own/{n % 4}" for n in range(len(own_texts) - 1)] + ["top.txt"]
    (tmp_path / "filter.py").write_text(_FILTER)
    return write_texts(tmp_path / "raw", texts, source=sources)


def test_a_curated_dataset_has_a_report(tmp_path: Path, raw: Path) -> None:
    printed = curate_in_units(tmp_path, raw, "--save-dir", "one", *_OPTIONS, pages=True).stdout
    files = read_dataset_files(tmp_path / "one")
    page = check_page(files["report.html"].decode())
    assert str(tmp_path) not in page.text
    assert "email\n1\n(no directory) 1\na…@f….de" in page.text
    assert "<email>" in page.text and "firma-berg" not in page.text
    content = json.loads((tmp_path / "one/manifest.json").read_text())
    assert "report.html" in {entry["path"] for entry in content["files"]}
    summary = content["summary"]
    for text in (
        f"The dataset contains {summary['rows']:,} rows",
        "mirror lost",
        "Samples of dropped rows",
        "<script>alert(1)</script>\\u202e",
        "(no directory)",
        "Near duplicates",
    ):
        assert text in page.text, text
    assert "lost over half" in printed and "one/report.html" in printed
    by_rule = Counter(line["rule"] for line in read_dropped(tmp_path / "one"))
    assert {*by_rule} == {"too short", "duplicate", "near duplicate"} == {*summary["dropped"]}
    assert by_rule == summary["dropped"]
    curate_in_units(tmp_path, raw, "--save-dir", "two", *_OPTIONS, "--num-workers", 3)
    assert read_dataset_files(tmp_path / "two") == files


def test_a_sample_shows_what_rules_drop_before_anything_is_built(tmp_path: Path, raw: Path) -> None:
    show = ("--sample-dropped", 1, "--dry-run")
    done = curate(tmp_path, raw, "--save-dir", "out", *_OPTIONS, *show)
    assert "too short: 2 rows" in done.stdout and "duplicate" in done.stdout
    assert done.stdout.count("characters)") == 1 and "firma-berg" not in done.stdout
    assert not (tmp_path / "out").exists()
    refused = curate(tmp_path, raw, "--save-dir", "out", "--merge", *show, expect=2)
    assert "--sample-dropped" in refused.stderr
