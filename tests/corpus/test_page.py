# covers: lib/corpus/page/content.py, lib/corpus/page/facts.py, lib/corpus/page/report.html.j2
"""The page about a dataset shows its facts, and hostile texts do nothing on it."""

from __future__ import annotations

import dataclasses

from lib.corpus.page import content
from lib.corpus.page.content import compose_page
from lib.corpus.page.facts import CorpusFacts, RuleFacts, SourceFacts
from lib.corpus.row_tally import DroppedSample
from tests.corpus.page_facts import make_facts
from tests.pages.test_svg import HOSTILE, check_page


def test_the_page_shows_every_section_and_marks_a_source_that_lost_half():
    parsed = check_page(compose_page(make_facts()))
    for text in (
        "contains 745,000 rows, 3.5 GB of text",
        "lost 60.3 % of its 1,000 rows, 600 of them by near duplicate",
        "lost over half",
        "2 files failed",
        "gopher: stop words",
        "at least 50,000",
        "not known",
        "median between 2.5 kB and 4.0 kB",
        "Rows by language, 3 languages",
        "all from 0.8 on",
        "too few pairs",
        "web/12000.html, row 1",
        "duplicates a.txt, row 2",
        "sha256:8f3472cfe8738a7b6099e8e999c3cbfa",
    ):
        assert text in parsed.text, text
    assert parsed.text.count("Samples of ") == 2 + 1


def test_hostile_texts_are_shown_and_do_nothing():
    parsed = check_page(compose_page(make_facts(HOSTILE + "\0")))
    assert parsed.text.count("<script>alert(1)</script>\\u202e\\x1b[31m\\ud800&\"'\\x00") > 40


def test_the_page_of_an_empty_or_tiny_dataset_is_well_formed():
    empty = CorpusFacts("document", 1, 0, 0, 0, 0, {"train": 0}, 0)
    assert "No option dropped rows." in check_page(compose_page(empty)).text
    tiny = dataclasses.replace(
        empty,
        rows=1,
        rules=[RuleFacts("short", "--min-chars 9", 1, 0, 1)],
        lengths={0: 1},
        sources=[SourceFacts("web", 1, 0, {"short": 1}, 0)],
    )
    assert "short dropped 100.0 % of all rows." in check_page(compose_page(tiny)).text


def test_a_page_of_many_rules_and_sources_stays_small(monkeypatch):
    text = "\u202e€𝄞" * 66
    samples = [DroppedSample(n, text * 2, n, f"value {n}.", text, text) for n in range(10)]
    facts = dataclasses.replace(
        make_facts(text),
        rules=[RuleFacts(f"rule {n}", text, 9, 9, 9, samples=samples) for n in range(60)],
        sources=[SourceFacts(f"{n} {text}", 9, 9, {"rule 1": 9}, 9) for n in range(1000)],
        languages={f"l{n}": (n, 0) for n in range(500)},
    )
    page = compose_page(facts)
    assert len(page.encode()) <= content.LARGEST
    parsed = check_page(page)
    assert "981 more problems" in parsed.text and "first 80 of 1,000 lines" in parsed.text
    assert parsed.text.count("value 9.") == 60
    monkeypatch.setattr(content, "LARGEST", len(page.encode()) - 1)
    text = check_page(compose_page(facts)).text
    assert "value 9." not in text and text.count("value 2.") == 60
