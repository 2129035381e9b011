# covers: lib/curate/quality/judge.py, lib/curate/quality/measures.py, lib/curate/words.py
# covers: lib/curate/quality/layout.py, lib/curate/quality/phrases.py, lib/curate/quality/repeats.py
"""The figures of the quality rules equal those of a plain implementation, in every batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from lib.curate.quality import thresholds
from lib.curate.quality.judge import Judge, is_dropped
from lib.curate.quality.layout import find_layouts
from lib.curate.quality.word_lists import ENGLISH_LISTS, WordLists
from lib.curate.words import PIECE_CHARACTERS
from tests.curate.quality_reference import measure_repeated, measure_text, split_words

PIECES = [
    *("the", "be", "to", "of", "And", "cat", "dog", "house", "javascript", "lorem", "ipsum"),
    *("use cookies", "terms of use", "12", "3.14", "#tag", "#", "...", "....", "…", "{", "}"),
    *("end.", "end!", "end?", 'end."', "x" * 40, "a-b", "snake_case", "Lorem ipsum", "-", "*"),
]
WIDE = [
    "ÄRGER",
    "cafe\u0301",
    "”",
    "字",
    "日本語。",
    "です！？",
    "ภาษา",
    "»",
    "•",
    "– x",
    "İ",
    "\u00a0",
]
ENDS = [" ", " ", " ", " ", "  ", ", ", "\t", "\n", ".\n", "\r\n", "\n\n", "\n \n\n", "...\n", ""]
SETTINGS = {"end_marks": True, "min_words": 2, "longest": 30}


def make_judge(**settings: object) -> Judge:
    limits = thresholds.find_limits(
        thresholds.FAMILIES,
        ["c4.end_marks=1", "c4.min_line_words=2", "c4.max_word_characters=30"],
    )
    return Judge(limits, {"": ENGLISH_LISTS})


def make_text(draw: random.Random, pieces: list[str]) -> str:
    some = draw.choices(pieces, k=draw.choice([1, 3, 10, len(pieces)]))
    text = "".join(
        draw.choice(some) + draw.choice(ENDS) for _ in range(draw.choice([0, 1, 2, 5, 30, 200]))
    )
    return text * draw.choice([1, 1, 1, 3])


def make_texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    wide = PIECES + WIDE
    texts = [make_text(draw, draw.choice([PIECES, wide, WIDE])) for _ in range(count)]
    return [*texts, "", "\n", "one", "字", "...", "\r\n\r\n", "a\nb\n\na\nb", "a a a a a"]


def measure_batch(texts: list[str]) -> dict[str, np.ndarray]:
    return make_judge().measure(find_layouts(texts), [""] * len(texts))


@pytest.mark.parametrize("seed", range(3))
def test_all_figures_equal_those_of_a_plain_implementation(seed):
    texts = make_texts(seed, 150)
    results = measure_batch(texts)
    assert len(results) == sum(threshold.is_rule for threshold in thresholds.THRESHOLDS.values())
    for number, text in enumerate(texts):
        expected = measure_text(text, **SETTINGS)
        for name, values in results.items():
            figure = f"{thresholds.find_family(name)}.{thresholds.find_figure(name)}"
            assert values[number] == pytest.approx(expected[figure], nan_ok=True), (name, text)
    varied = [name for name, values in results.items() if len(set(values[~np.isnan(values)])) > 1]
    assert len(varied) == len(results)


def test_a_text_has_the_same_figures_alone_and_in_any_batch():
    texts = make_texts(7, 60)
    together = measure_batch(texts)
    for number, text in enumerate(texts):
        alone = measure_batch([text])
        assert all(
            np.array_equal(values[number : number + 1], alone[name], equal_nan=True)
            for name, values in together.items()
        ), text


def test_a_text_with_long_lines_has_the_same_figures_alone_and_in_any_batch():
    size = 3 * PIECE_CHARACTERS
    lines = ["words " * size, "x" * size, "one two. " * size]
    sizes = [PIECE_CHARACTERS + more for more in (-1, 0, 1, 9)]
    sizes.append(size)
    texts = [line[:size] for line in lines for size in sizes]
    texts += [f"a first line\n{text}\nand a last one" for text in texts]
    texts += [text + "é" for text in texts]
    random.Random(0).shuffle(texts)
    together = measure_batch(texts)
    for number, text in enumerate(texts):
        for name, values in measure_batch([text]).items():
            assert np.array_equal(values[0], together[name][number], equal_nan=True), (name, number)


@pytest.mark.parametrize("wide", ["", "é"])
def test_a_text_that_is_larger_than_a_piece_is_measured_as_a_whole(wide):
    draw = random.Random(3)
    lines = [f"{draw.choice(PIECES)} the {draw.choice(PIECES)}{wide} end." for _ in range(12_000)]
    text = "\n".join(lines)
    assert len(text) > 1.5 * PIECE_CHARACTERS
    results = {name: values[0] for name, values in measure_batch([text]).items()}
    assert results["c4.max_braces"] == text.count("{") > 100
    assert results["gopher-repetition.max_duplicate_lines"] == pytest.approx(
        1 - len({line.lower() for line in lines}) / len(lines)
    )
    assert results["gopher-repetition.max_duplicate_5_grams"] == pytest.approx(
        measure_repeated(split_words(text.lower()), 5)
    )
    assert results["fineweb.min_end_mark_lines"] == 1


def test_a_line_that_is_larger_than_a_piece_counts_as_several():
    line = "word " * (PIECE_CHARACTERS // 4)
    results = measure_batch([line])
    assert results["gopher.min_words"] == PIECE_CHARACTERS // 4
    assert results["fineweb.max_newlines"] == results["fineweb.max_short_lines"] == 0
    assert results["gopher-repetition.max_top_2_gram"] > 1.9  # overlapping occurrences all count


def test_texts_at_the_published_thresholds_are_kept_and_others_dropped():
    """Each text is on the right side of a threshold; one more word or line changes that."""
    filler = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}xyz" for i in range(600)]
    judge = Judge(thresholds.find_limits(thresholds.FAMILIES, []), {"": ENGLISH_LISTS})
    cases = {
        "gopher.min_words": (" ".join(filler[:50]), " ".join(filler[:49])),
        "gopher.max_words": ("a " * 100_000, "a " * 100_001),
        "gopher.min_word_length": ("ab abcd", "ab abc"),
        "gopher.max_word_length": ("a" * 10, "a" * 11),
        "gopher.max_hash_signs": ("# " + " ".join(filler[:10]), "# " + " ".join(filler[:9])),
        "gopher.max_ellipses": ("… " + " ".join(filler[:10]), "... " + " ".join(filler[:9])),
        "gopher.max_bullet_lines": ("- a\n" * 9 + "a", "- a\n" * 10 + "\n"),
        "gopher.max_ellipsis_lines": ("a...\n" * 3 + "a\n" * 7, "a...\n" * 4 + "a\n" * 6),
        "gopher.min_letter_words": ("a b c d 1", "a b c 1"),
        "gopher.min_stop_words": ("the cat and", "the cat the"),
        "gopher-repetition.max_duplicate_lines": (
            "\n".join(filler[:7] + filler[:3]),
            "\n".join(filler[:6] + filler[:3]),
        ),
        "gopher-repetition.max_top_2_gram": (
            " ".join(filler[:16] + filler[4:6] + filler[18:20]),
            " ".join(filler[:16] + filler[4:6] + filler[18:19]),
        ),
        "gopher-repetition.max_duplicate_5_grams": (
            " ".join(filler[:29] + filler[5:10]),
            " ".join(filler[:28] + filler[5:10]),
        ),
        "c4.min_sentences": (
            "One two three four five. So.\nA b c d e!",
            "A b c d e. So.\nA b c d.",
        ),
        "c4.max_braces": ("}", "{"),
        "c4.max_lorem_ipsum": ("lorem dolor ipsum", "Lorem\nipsum"),
        "fineweb.min_end_mark_lines": ("a.\n" * 3 + "a\n" * 22, "a.\n" * 2 + "a\n" * 15),
        "fineweb.max_short_lines": ("a\n" * 2 + "a" * 31, "a\n" * 3 + "a" * 31),
        "fineweb.max_duplicate_line_characters": ("a" * 98 + "\nb\nb", "a" * 97 + "\nb\nb"),
        "fineweb.max_newlines": ("a b\n" * 3 + "c d e f", "a b\n" * 3 + "c d e"),
    }
    for name, texts in cases.items():
        values = judge.measure(find_layouts(list(texts)), ["", ""])[name]
        limit = judge.limits[name]
        assert list(is_dropped(name, limit, values)) == [False, True], (name, values)


def test_texts_in_scripts_without_spaces_are_not_judged_by_lengths_and_n_grams():
    chinese = "今天天气很好。我们去公园散步，然后回家吃饭。\n" * 5
    results = {name: values[0] for name, values in measure_batch([chinese]).items()}
    assert results["gopher.min_words"] == len([c for c in chinese if c not in "。，\n"]) / 2
    assert math.isnan(results["gopher.min_word_length"])
    assert math.isnan(results["gopher-repetition.max_top_2_gram"])
    assert results["c4.min_sentences"] == 10


def test_lists_of_a_language_only_judge_texts_in_it():
    lists = {
        "en": ENGLISH_LISTS,
        "de": WordLists(("der", "die", "zum Beispiel"), ("nutzt Cookies",)),
    }
    judge = Judge(thresholds.find_limits(["gopher", "c4"], ["c4.min_line_words=1"]), lists)
    text = "Der Hund, zum\nBeispiel die Katze. So.\nDiese Seite nutzt cookies. Ja.\nThe end be."
    texts = [text, text, text]
    results = judge.measure(find_layouts(texts), ["de", "en", "und"])
    assert results["gopher.min_stop_words"] == pytest.approx([3, 2, math.nan], nan_ok=True)
    assert results["c4.min_sentences"].tolist() == [3, 5, 5]
