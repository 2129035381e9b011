# covers: lib/curate/steps/quality.py, lib/curate/quality/rules.py, lib/curate/quality/thresholds.py
# covers: lib/curate/quality/word_lists.py
"""The options of the quality rules: names, thresholds, lists of words, exempt sources."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import UsageError
from lib.curate import reader
from lib.curate.quality import thresholds
from lib.curate.reader import SourceDataset
from lib.curate.rows import Row, RowBatch
from lib.curate.step import RuleVerdict
from lib.curate.steps import duplicates
from lib.curate.steps.duplicates import DuplicateOptions, Duplicates
from lib.curate.steps.quality import QualityOptions, QualityRules
from tests.curate.curations import write_texts

ALL = list(thresholds.FAMILIES)


def make_rules(**options: object) -> QualityRules:
    rules = QualityRules.from_options(QualityOptions(**options))
    assert rules
    return rules


def make_batch(*rows: tuple[str, str], **columns: Sequence[str]) -> RowBatch:
    """Return a batch. rows: the source and the text of each row."""
    return RowBatch(
        [Row(number, source, [text], len(text), b"") for number, (source, text) in enumerate(rows)],
        columns,
    )


def judge(rules: QualityRules, batch: RowBatch) -> dict[str, RuleVerdict]:
    return {verdict.rule: verdict for verdict in rules.start().run(batch).verdicts}


@pytest.fixture
def source(tmp_path: Path) -> SourceDataset:
    """Return a dataset without further columns."""
    return reader.open_source(write_texts(tmp_path / "plain", ["a"]))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gopher.min_word=3", "the nearest is gopher.min_words"),
        ("min_words=3", "the nearest is gopher.min_words"),
        ("max_newlines=1", "the nearest is fineweb.max_newlines"),
        ("zebra=3", "expected one of gopher.min_words, "),
        ("gopher.min_words", "the default is gopher.min_words=50"),
        ("gopher.min_words=many", "NAME=NUMBER or NAME=off"),
        ("gopher.min_words=-1", "NAME=NUMBER or NAME=off"),
        ("gopher.min_words=nan", "NAME=NUMBER or NAME=off"),
    ],
)
def test_bad_settings_are_refused_with_the_nearest_name(setting, words):
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        thresholds.parse_settings(f"c4.phrases=off,{setting}")


def test_settings_replace_thresholds_and_switch_rules_off():
    limits = thresholds.find_limits(ALL, ["gopher.min_words=30", "c4.max_braces=off"])
    assert limits["gopher.min_words"] == 30 and limits["c4.max_braces"] is None
    assert limits["gopher.max_words"] == 100_000
    rules = make_rules(quality=["c4"], quality_set=["c4.max_braces=off"])
    assert [*rules.list_rules()] == ["c4.min_sentences", "c4.max_lorem_ipsum"]
    assert rules.describe() == {
        "c4": "min_sentences 3, max_braces off, max_lorem_ipsum 0, min_line_words 5, "
        "max_word_characters 1000, end_marks 1, phrases 1"
    }
    lines = thresholds.find_line_limits(
        thresholds.find_limits(["c4"], ["c4.max_word_characters=off", "c4.min_line_words=off"]),
        "c4",
    )
    assert lines["max_word_characters"] > 10**9 and lines["min_line_words"] == 0


def test_fineweb_does_not_ask_c4_for_end_marks_unless_a_setting_does():
    assert thresholds.find_limits(["c4"], [])["c4.end_marks"] == 1
    assert thresholds.find_limits(["fineweb", "c4"], [])["c4.end_marks"] == 0
    assert thresholds.find_limits(["fineweb", "c4"], ["c4.end_marks=1"])["c4.end_marks"] == 1


def test_the_thresholds_in_force_are_the_identity(tmp_path):
    one = make_rules(quality=["gopher"])
    two = make_rules(quality=["gopher", "gopher"], quality_set=["gopher.min_words=50"])
    assert one.identify() == two.identify()
    three = make_rules(quality=["gopher"], quality_set=["gopher.min_words=49"])
    assert one.identify() != three.identify()
    path = tmp_path / "words.yaml"
    path.write_text("de: {stop_words: [der, die]}")
    four = make_rules(quality=["gopher"], quality_words=path)
    before = four.identify()
    path.write_text("de: {stop_words: [der, das]}")
    assert four.identify() != before != one.identify()
    json.dumps(before)


@pytest.mark.parametrize(
    ("options", "content", "words"),
    [
        ({"quality_set": ["gopher.min_words=3"]}, "", "--quality-set needs --quality"),
        ({"quality_except": ["code"]}, "", "--quality-except needs --quality"),
        (
            {"quality": ["c4"], "quality_set": ["gopher.min_words=3"]},
            "",
            "gopher.min_words=3 needs",
        ),
        (
            {"quality": ["gopher"], "quality_set": ["gopher.max_words=40"]},
            "",
            "gopher.min_words=50 and gopher.max_words=40",
        ),
        ({"quality": ["gopher"]}, "de: [der, die]", "lists of words for 'de'"),
        ({"quality": ["gopher"]}, "de: {stop_words: ['!']}", "lists of words for 'de'"),
        ({"quality": ["gopher"]}, "{}", "is empty"),
        ({"quality": ["gopher"]}, "- der", "`key: value` lines"),
        ({"quality": ["gopher"]}, "de: {phrases: [a]}", "stop words"),
        ({"quality": ["c4"]}, "de: {stop_words: [der]}", "list of phrases"),
        (
            {"quality": ["gopher"]},
            "{de: {stop_words: [a]}, fr: {stop_words: [b]}}",
            "languages de, fr",
        ),
    ],
)
def test_contradictory_options_are_refused(tmp_path, source, options, content, words):
    if content:
        path = tmp_path / "words.yaml"
        path.write_text(content)
        options = options | {"quality_words": path}
    with pytest.raises(UsageError, match=words):
        make_rules(**options).require_source(source)


def test_lists_may_be_missing_if_the_rules_that_need_them_are_off(tmp_path, source):
    path = tmp_path / "words.json"
    path.write_text('{"de": {"stop_words": ["der", "die"]}}')
    rules = make_rules(quality=["gopher", "c4"], quality_set=["c4.phrases=off"], quality_words=path)
    rules.require_source(source)
    path.unlink()
    with pytest.raises(UsageError, match="no such file"):
        rules.require_source(source)


@pytest.mark.parametrize(
    ("languages", "words"),
    [
        (["en"], ""),
        (["en", "de", "und"], ""),
        (["all"], ""),
        (["en", "fr"], "gopher.min_stop_words needs a list of stop words for fr"),
    ],
)
def test_each_named_language_needs_its_lists(tmp_path, source, languages, words):
    path = tmp_path / "words.yaml"
    path.write_text("de: {stop_words: [der], phrases: [nutzt Cookies]}")
    rules = make_rules(quality=["gopher", "c4"], quality_words=path, language=languages)
    if words:
        with pytest.raises(UsageError, match=words):
            rules.require_source(source)
    else:
        rules.require_source(source)


def test_a_column_of_languages_in_the_input_selects_the_lists(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("{de: {stop_words: [der, die]}, fr: {stop_words: [le]}}")
    labelled = reader.open_source(write_texts(tmp_path / "in", ["a"], language=["de"]))
    rules = make_rules(quality=["gopher"], quality_words=path)
    rules.require_source(labelled)
    texts = [("", "Der Hund, die Katze")] * 4
    verdicts = judge(rules, make_batch(*texts, language=["de", "en", "es", None]))
    assert verdicts["gopher.min_stop_words"].dropped.tolist() == [False, True, False, False]
    assert verdicts["gopher.min_words"].dropped.tolist() == [True] * 4


@pytest.mark.parametrize("words", ["", "de: {stop_words: [der, die]}"])
def test_without_languages_all_rows_are_in_one(tmp_path, words):
    path = tmp_path / "words.yaml"
    path.write_text(words)
    rules = make_rules(quality=["gopher"], quality_words=path if words else None)
    verdicts = judge(rules, make_batch(("", "Der Hund, die Katze"), ("", "the end and")))
    dropped = verdicts["gopher.min_stop_words"].dropped.tolist()
    assert dropped == ([False, True] if words else [True, False])


def test_sources_that_do_not_exist_are_refused_with_the_nearest_name(tmp_path, source):
    names = ["code/a.py", "web/b", "c"]
    known = reader.open_source(write_texts(tmp_path / "in", ["a", "b", "c"], source=names))
    make_rules(quality=["c4"], quality_except=["code", "web"]).require_source(known)
    with pytest.raises(UsageError, match="no source 'codes'") as error:
        make_rules(quality=["c4"], quality_except=["codes"]).require_source(known)
    assert "code, web" in error.value.expected
    with pytest.raises(UsageError, match="needs a column `source`"):
        make_rules(quality=["c4"], quality_except=["code"]).require_source(source)


def test_rows_of_exempt_sources_are_kept_and_others_name_their_rule():
    rules = make_rules(quality=["gopher", "c4"], quality_except=["code"])
    code = ("code/a.py", "{")
    batch = make_batch(code, ("web/a.html", "{"), ("web/b.html", "one two"), ("a", "x = {"))
    verdicts = judge(rules, batch)
    assert [*verdicts] == [*rules.list_rules()]
    assert verdicts["c4.max_braces"].dropped.tolist() == [False, True, False, True]
    assert verdicts["gopher.min_words"].dropped.tolist() == [False, True, True, True]
    assert verdicts["gopher.min_words"].values[1:] == [0, 2, 1]
    assert not any(verdict.dropped.any() for verdict in judge(rules, make_batch(code)).values())


def test_rules_and_signatures_share_the_words_of_a_batch(monkeypatch):
    near = Duplicates.from_options(DuplicateOptions(dedup="near"))
    assert near
    texts = ["The cat and the dog have one bed.", "Die Katze über dem Hund " * 20, ""]
    rows = [("", text) for text in texts]
    expected = near.start().run(make_batch(*rows)).sidecars
    batch = make_batch(*rows)
    judge_rows = make_rules(quality=["gopher"]).start()
    judge_rows.run(batch)
    monkeypatch.setattr(duplicates, "find_words", None)  # the words must not be computed again
    shared = near.start().run(batch).sidecars
    assert expected and all(np.array_equal(shared[name], expected[name]) for name in expected)


def test_every_threshold_is_in_the_guide_for_curation():
    guide = (Path(__file__).parents[2] / "docs/how-to/curate.md").read_text(encoding="utf-8")
    for name, threshold in thresholds.THRESHOLDS.items():
        short = name.partition(".")[2]
        assert f"`{short}`" in guide and f"{threshold.default:g}" in guide, name
