# covers: lib/corpus/quality/judge.py, lib/corpus/quality/measures.py, lib/corpus/words.py
"""The figures of the quality rules equal those of a plain implementation, in every batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lib.corpus.quality import thresholds
from lib.corpus.quality.judge import Judge
from lib.corpus.quality.layout import find_layouts
from lib.corpus.quality.word_lists import ENGLISH_LISTS
from tests.corpus.quality_reference import measure

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
    assert len(results) == sum(each.is_rule for each in thresholds.THRESHOLDS.values())
    for number, text in enumerate(texts):
        expected = measure(text, **SETTINGS)
        for name, values in results.items():
            figure = f"{thresholds.find_family(name)}.{thresholds.find_figure(name)}"
            assert values[number] == pytest.approx(expected[figure], nan_ok=True), (name, text)
    varied = [name for name, values in results.items() if len(set(values[~np.isnan(values)])) > 1]
    assert len(varied) == len(results)
