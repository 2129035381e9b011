# covers: lib/curate/shingles.py
"""The shingles of a text are the n-grams of its words, in every script and in every batch."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest

from lib.curate import shingles
from lib.curate.words import PIECE_CHARACTERS

EXPECTED = ["0x489c0935396dec7c", "0xefd4e4f2408f190f", "0xd60aba88e94851de", "0xbbf89bc50362a921"]
WORD = re.compile(r"[぀-ヿ一-鿿฀-๿]|[^\W_぀-ヿ一-鿿฀-๿]+")
TEXTS = [
    "The cat sat on the mat, and the DOG sat too. 3.14 is not 3.15!",
    "the cat sat on THE mat and the dog sat too 3 14 is not 3 15",
    "Über die Brücke, über den Fluß: Ärger, ärger, ÄRGER und mehr davon",
    "日本語のテキストです。one two three four five カタカナ",
    "ภาษาไทยไม่มีช่องว่าง",
    "snake_case_name and x=1;y=2 for(i)",
    "one two",
    "One, two?",
    "three",
    "!!! ???",
    "",
    "x" * 40 + " " + "word " * 50,
]


def list_reference(text: str, words: int) -> list[tuple[str, ...]]:
    """Return the n-grams of a text without marks, by a regular expression."""
    words_of_text = WORD.findall(unicodedata.normalize("NFC", text).lower())
    if len(words_of_text) < words:
        return [tuple(words_of_text)] if words_of_text else []
    return [tuple(words_of_text[i : i + words]) for i in range(len(words_of_text) - words + 1)]


def list_hashes(texts: list[str], words: int) -> list[list[int]]:
    result = shingles.hash_texts(texts, words)
    starts = [0, *result.ends[:-1]]
    return [result.hashes[a:b].tolist() for a, b in zip(starts, result.ends.tolist(), strict=True)]


@pytest.mark.parametrize("words", [1, 2, 5, 8])
def test_equal_n_grams_and_no_others_have_equal_hashes(words):
    draw = random.Random(words)
    texts = TEXTS + [" ".join(draw.choices(["a", "b", "cé", "dd", "字"], k=60)) for _ in range(30)]
    draw.shuffle(texts)
    by_gram: dict[tuple[str, ...], int] = {}
    for text, hashes in zip(texts, list_hashes(texts, words), strict=True):
        grams = list_reference(text, words)
        assert len(grams) == len(hashes), text
        for gram, value in zip(grams, hashes, strict=True):
            assert by_gram.setdefault(gram, value) == value, gram
    assert len(set(by_gram.values())) == len(by_gram) > 20


def test_a_text_has_the_same_shingles_alone_and_in_any_batch():
    together = list_hashes(TEXTS, 5)
    assert together == [list_hashes([text], 5)[0] for text in TEXTS]
    assert together[::-1] == list_hashes(TEXTS[::-1], 5)


def test_texts_are_compared_in_nfc_and_lower_case_but_accents_and_digits_count():
    composed = "caf\u00e9 AU lait 1"
    decomposed = "cafe\u0301 au lait 1"
    texts = [composed, decomposed, "cafe au lait 1", "cafe au lait 2"]
    one, two, three, four = list_hashes(texts, 3)
    assert one == two != three
    assert three[0] == four[0] and three[1] != four[1]


@pytest.mark.parametrize("end", ["", " é"])
def test_a_text_larger_than_a_piece_is_cut_between_words(end):
    draw = random.Random(0)
    words = [str(draw.randrange(10**6)) for _ in range(80_000)]
    text = " ".join(words) + end
    assert len(text) > 3 * PIECE_CHARACTERS
    (hashes,) = list_hashes([text], 5)
    parts = [" ".join(words[i : i + 9]) for i in range(0, len(words) - 8, 5)]
    few = [value for part in list_hashes(parts, 5) for value in part]
    assert hashes[: len(few)] == few
    (blob,) = list_hashes(["x" * (2 * PIECE_CHARACTERS + 5)], 5)
    assert len(blob) == 1


def test_hashes_never_change():
    """Signatures beside a dataset are compared with those of later versions."""
    values = shingles.hash_texts(["one two three four five six", "a b", "日本語"], 5).hashes
    assert values.dtype == np.uint64
    assert [hex(int(value)) for value in values] == EXPECTED
