# covers: lib/curate/quality/rules.py, lib/curate/quality/thresholds.py
# covers: lib/curate/quality/word_lists.py
"""The options of the quality rules: names, thresholds, lists of words, exempt sources."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from lib.core import declared
from lib.core.errors import UsageError
from lib.corpus import selection
from lib.corpus.inputs import InputFile
from lib.corpus.row_batch import RowBatch, RowText
from lib.corpus.row_options import RowOptions
from lib.curate.quality import rules, thresholds

ALL = list(thresholds.FAMILIES)


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
    options = RowOptions(quality=["c4"], quality_set=["c4.max_braces=off"])
    assert rules.list_rules(options) == ["c4.min_sentences", "c4.max_lorem_ipsum"]
    assert rules.describe_quality(options) == {
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
    assert rules.identify_quality(RowOptions()) == {}
    one = RowOptions(quality=["gopher"])
    two = RowOptions(quality=["gopher", "gopher"], quality_set=["gopher.min_words=50"])
    assert rules.identify_quality(one) == rules.identify_quality(two)
    three = RowOptions(quality=["gopher"], quality_set=["gopher.min_words=49"])
    assert rules.identify_quality(one) != rules.identify_quality(three)
    path = tmp_path / "words.yaml"
    path.write_text("de: {stop_words: [der, die]}")
    four = RowOptions(quality=["gopher"], quality_words=path)
    before = rules.identify_quality(four)
    path.write_text("de: {stop_words: [der, das]}")
    assert rules.identify_quality(four) != before != rules.identify_quality(one)
    json.dumps(before)


@pytest.mark.parametrize(
    ("options", "content", "words"),
    [
        ({"quality_set": ["gopher.min_words=3"]}, "", "--quality-set needs --quality"),
        ({"quality_except": ["code"]}, "", "--quality-except needs --quality"),
        (
            {"quality": ["c4"], "quality_set": ["gopher.min_words=3"]},
            "",
            "--quality-set gopher.min_words=3 needs --quality gopher",
        ),
        (
            {"quality": ["gopher"], "quality_set": ["gopher.max_words=40"]},
            "",
            "no row can pass gopher.min_words=50 and gopher.max_words=40",
        ),
        ({"quality": ["gopher"]}, "de: [der, die]", "contains no lists of words for 'de'"),
        ({"quality": ["gopher"]}, "de: {stop_words: ['!']}", "contains no lists of words for 'de'"),
        ({"quality": ["gopher"]}, "{}", "is empty"),
        ({"quality": ["gopher"]}, "- der", "must contain `key: value` lines"),
        ({"quality": ["gopher"]}, "de: {phrases: [a]}", "needs a list of stop words"),
        ({"quality": ["c4"]}, "de: {stop_words: [der]}", "needs a list of phrases"),
        (
            {"quality": ["gopher"]},
            "{de: {stop_words: [a]}, fr: {stop_words: [b]}}",
            "contains the languages de, fr, and the language of a row is not known",
        ),
    ],
)
def test_contradictory_options_are_refused(tmp_path, options, content, words):
    if content:
        path = tmp_path / "words.yaml"
        path.write_text(content)
        options = options | {"quality_words": path}
    with pytest.raises(UsageError, match=words):
        rules.require_quality(RowOptions(**options))


def test_lists_may_be_missing_if_the_rules_that_need_them_are_off(tmp_path):
    path = tmp_path / "words.json"
    path.write_text('{"de": {"stop_words": ["der", "die"]}}')
    rules.require_quality(
        RowOptions(quality=["gopher", "c4"], quality_set=["c4.phrases=off"], quality_words=path)
    )
    path.unlink()
    with pytest.raises(UsageError, match="no such file"):
        rules.require_quality(RowOptions(quality=["gopher"], quality_words=path))


@pytest.mark.parametrize(
    ("languages", "words"),
    [
        (["en"], ""),
        (["en", "de", "und"], ""),
        (["all"], ""),
        (["en", "fr"], "gopher.min_stop_words needs a list of stop words for fr"),
    ],
)
def test_each_named_language_needs_its_lists(tmp_path, languages, words):
    path = tmp_path / "words.yaml"
    path.write_text("de: {stop_words: [der], phrases: [nutzt Cookies]}")
    options = RowOptions(quality=["gopher", "c4"], quality_words=path, language=languages)
    if words:
        with pytest.raises(UsageError, match=words):
            rules.require_quality(options)
    else:
        rules.require_quality(options)


def test_rows_are_judged_by_the_lists_of_their_language(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("de: {stop_words: [der, die]}")
    options = RowOptions(quality=["gopher"], quality_words=path, language=["all"])
    batch = RowBatch([RowText(["Der Hund, die Katze"]) for _ in range(3)])
    batch.columns["language"] = ["de", "en", "fr"]
    verdicts = {rule.kind: rule.check(batch) for rule in rules.start_rules(options)}
    assert verdicts["gopher.min_stop_words"].dropped.tolist() == [False, True, False]
    assert verdicts["gopher.min_words"].dropped.tolist() == [True, True, True]


def test_sources_that_do_not_exist_are_refused_with_the_nearest_name():
    files = [InputFile(f"split/{name}", name, 1, 0) for name in ("code/a.py", "web/b", "c")]
    rules.require_sources(RowOptions(quality_except=["code", "web"]), files)
    with pytest.raises(UsageError, match="no source 'codes'; the nearest is code") as error:
        rules.require_sources(RowOptions(quality_except=["codes"]), files)
    assert "code, web" in error.value.expected


def test_rows_of_exempt_sources_are_kept_and_others_name_their_rule():
    options = RowOptions(quality=["gopher", "c4"], quality_except=["code"])
    texts = [("code/a.py", "{"), ("web/a.html", "{"), ("web/b.html", "one two"), ("a", "x = {")]
    batch = RowBatch([RowText([text], source, source) for source, text in texts])
    verdicts = {rule.kind: rule.check(batch) for rule in selection.start_rules(options)}
    assert list(verdicts) == list(selection.list_rules(options))
    assert verdicts["c4.max_braces"].dropped.tolist() == [False, True, False, True]
    assert verdicts["gopher.min_words"].dropped.tolist() == [False, True, True, True]
    assert verdicts["gopher.min_words"].values[1:] == [0, 2, 1]
    only_code = RowBatch(batch.rows[:1])
    assert not any(rule.check(only_code).dropped.any() for rule in selection.start_rules(options))


def test_rules_and_signatures_share_the_words_of_a_batch(monkeypatch):
    options = RowOptions(quality=["gopher"], dedup="near")
    texts = ["The cat and the dog have one bed.", "Die Katze über dem Hund " * 20, ""]
    rows = [RowText([text]) for text in texts]
    keys = selection.SIDECARS["keys"].measure_batch
    assert keys is not None
    expected = keys(RowBatch(rows), options)
    batch = RowBatch(rows)
    for rule in selection.start_rules(options):
        rule.check(batch)
    monkeypatch.setattr(selection, "find_words", None)  # the words must not be computed again
    assert (keys(batch, options) == expected).all()


def test_every_threshold_is_in_the_guide_for_data():
    guide = (Path(__file__).parents[2] / "docs/how-to/data.md").read_text(encoding="utf-8")
    for name, threshold in thresholds.THRESHOLDS.items():
        short = name.partition(".")[2]
        assert f"`{short}`" in guide and f"{threshold.default:g}" in guide, name
    assert declared.default_of(RowOptions.__dataclass_fields__["quality"]) == []
