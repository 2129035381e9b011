# covers: lib/curate/decontaminate/index.py, lib/curate/decontaminate/matching.py
# covers: lib/curate/decontaminate/hits.py
"""Which test questions occur in documents, which cannot be compared, and how hits are counted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from lib.curate.decontaminate import index, matching
from lib.curate.decontaminate.hits import TestHits, add_hits
from lib.curate.decontaminate.index import Index
from lib.curate.decontaminate.questions import Question
from lib.curate.rows import Row, RowBatch

DRAW = random.Random(0)
GETTYSBURG = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal."
)
HAN = "".join(chr(DRAW.randrange(0x4E00, 0x9FFF)) for _ in range(60))
THAI = "".join(chr(0x0E01 + DRAW.randrange(46)) for _ in range(60))


def make_words(count: int) -> str:
    return " ".join(f"w{DRAW.randrange(10**6)}" for _ in range(count))


def make_index(**sets: Sequence[str]) -> Index:
    numbered = [
        (name, [Question(number, text) for number, text in enumerate(texts, 1)])
        for name, texts in sets.items()
    ]
    return index.build_index(numbered)


def make_row(text: str, number: int = 0, questions: Sequence[str] = ()) -> Row:
    return Row(number, "a.txt", [text], len(text), b"", questions)


def compare_rows(
    test_index: Index, rows: Sequence[Row], least: float = 0.5
) -> tuple[list[bool], list[str | None], TestHits]:
    """Return which rows contain a question, a text about each hit, and the counts."""
    comparison = matching.Comparison(test_index, least)
    is_hit, values = comparison.compare(RowBatch(rows, {}))
    return is_hit.tolist(), values, comparison.hits


def compare_texts(
    test_index: Index, *texts: str, least: float = 0.5
) -> tuple[list[bool], list[str | None], TestHits]:
    """Return the results of `compare_rows` for rows with these numbers from 0."""
    rows = [make_row(text, number) for number, text in enumerate(texts)]
    return compare_rows(test_index, rows, least)


def count_shares(test_index: Index, text: str) -> list[float]:
    """Return the shares of all questions that a text contains at least a part of."""
    grams = matching.hash_batch(RowBatch([make_row(text)], {}))
    return [round(share, 4) for share in matching.find_hits(test_index, grams, 0.0).shares.tolist()]


def list_reference_share(question: str, text: str) -> float:
    grams = []
    for words in (question.split(), text.split()):
        grams.append({tuple(words[i : i + 8]) for i in range(len(words) - 7)})
    return len(grams[0] & grams[1]) / len(grams[0])


@pytest.mark.parametrize(
    ("question", "copy"),
    [
        (GETTYSBURG, GETTYSBURG.upper().replace(",", " --").replace(" ", "\n")),
        (GETTYSBURG, f'He began: "{GETTYSBURG}" and went on.'),
        (make_words(40), None),
        ("Über die Brücke " + make_words(20) + " e\u0301t\u00e9", None),
        (HAN, HAN),
        (HAN, "。".join(HAN[i : i + 20] for i in range(0, 60, 20))),
        (THAI, THAI),
    ],
    ids=["case", "quoted", "words", "accents", "Han", "Han with punctuation", "Thai"],
)
def test_a_copy_is_found_whatever_its_case_punctuation_and_script(question, copy):
    copy = copy or question.upper().replace("E\u0301T\u00c9", "\u00e9te\u0301")
    test_index = make_index(one=[make_words(30), question])
    is_hit, values, hits = compare_texts(
        test_index, make_words(50), make_words(9) + f" {copy} " + make_words(9)
    )
    assert is_hit == [False, True]
    assert values == [None, "one question 2 (1.00)"]
    assert dict(hits.sets["one"].questions) == {2: 1}
    assert (hits.compared, hits.documents, hits.beginnings) == (2, 1, 0)


def test_the_share_is_that_of_the_distinct_n_grams_of_the_question():
    question = make_words(50)
    words = question.split()
    test_index = make_index(one=[question, make_words(50)])
    for first, last in ((0, 50), (0, 29), (0, 28), (10, 38), (0, 8), (20, 27)):
        part = " ".join(words[first:last])
        text = f"{make_words(20)} {part} {make_words(3)} {part}"
        share = list_reference_share(question, text)
        assert count_shares(test_index, text) == ([round(share, 4)] if share else [])
    # 29 words contain 22 of the 43 n-grams.
    half = " ".join(words[:29])
    parts = half, " ".join(words[:28]), " ".join(words[:25] + words[26:])
    assert compare_texts(test_index, *parts)[0] == [True, False, True]
    assert compare_texts(test_index, half, least=0.6)[0] == [False]


def test_instructions_that_questions_share_do_not_count():
    instruction = "Read the passage and choose the one answer that best completes the sentence now:"
    closing = "Answer with one letter only, and do not explain why you have chosen it."
    questions = [make_words(25) for _ in range(12)]
    innocent = f"{instruction} {make_words(40)} {closing}"
    for first in (questions[0], make_words(25)):  # the second: no word is common to all questions
        texts = [f"{instruction} {text} {closing}" for text in [first, *questions[1:]]]
        texts[0] = texts[0] if first == questions[0] else first
        test_index = make_index(one=texts)
        assert test_index.sizes.tolist() == [18] * 12  # of 25 words
        texts = innocent, f"{make_words(9)} {questions[3]}"
        assert compare_texts(test_index, *texts)[0] == [False, True]


def test_an_n_gram_in_the_middle_of_many_questions_does_not_count():
    phrase = "which of the following statements about the passage is not true"
    pairs = [(make_words(20), make_words(20)) for _ in range(11)]
    few = make_index(one=[f"{a} {phrase} {b}" for a, b in pairs[:10]])
    many = make_index(one=[f"{a} {phrase} {b}" for a, b in pairs])
    assert few.sizes.tolist() == [44] * 10 and many.sizes.tolist() == [40] * 11
    assert count_shares(few, phrase) == [round(4 / 44, 4)] * 10
    assert count_shares(many, phrase) == []


def test_short_questions_are_named_as_unprotected():
    instruction = make_words(30)
    texts = [make_words(count) for count in (19, 20, 0, 7)]
    texts += [f"{instruction} {make_words(5)}" for _ in range(11)]
    (test_set,) = make_index(one=texts).test_sets
    assert test_set.unprotected == {"short": [1, 3, 4], "shared": [*range(5, 16)]}
    assert (test_set.questions, test_set.protected) == (15, 1)
    repeated = make_index(one=["word " * 50, make_words(30)]).test_sets[0]
    assert repeated.unprotected == {"shared": [1]}


def test_frequent_n_grams_are_ignored_and_their_questions_named():
    quoted = make_words(30)
    mixed = make_words(30)
    test_index = make_index(one=[quoted, f"{quoted} {mixed}", mixed], two=[quoted])
    grams = matching.hash_batch(RowBatch([make_row(quoted)], {}))
    is_frequent = np.zeros(len(test_index.hashes), bool)
    is_frequent[index.find_members(test_index, grams.hashes)[1]] = True
    together = np.array([30, 20, 0, 0])
    final = index.ignore_frequent(test_index, is_frequent, together, 0.5)
    assert [test_set.unprotected for test_set in final.test_sets] == [{"frequent": [1]}] * 2
    assert [test_set.frequent for test_set in final.test_sets] == [[[1, 30]], []]
    assert test_index.test_sets[0].unprotected == {}
    is_hit, _, hits = compare_texts(final, quoted, mixed)
    assert is_hit == [False, True]
    assert set(hits.sets["one"].questions) == {2, 3}


def test_a_stored_index_finds_the_same(tmp_path):
    test_index = make_index(**{f"set{n}": [make_words(40) for _ in range(50)] for n in range(4)})
    index.save_index(test_index, tmp_path / "index")
    stored = index.open_index(tmp_path / "index")
    assert stored.test_sets == test_index.test_sets
    hashes = np.concatenate([test_index.hashes[::3], test_index.hashes + np.uint64(1)])
    for one, two in zip(
        index.find_members(test_index, hashes), index.find_members(stored, hashes), strict=True
    ):
        assert one.tolist() == two.tolist()
    assert (
        index.find_members(test_index, hashes)[1].tolist()
        == [*range(len(hashes))][: 3 * len(test_index.hashes[::3]) : 3]
    )


def test_a_document_with_many_questions_names_the_best_and_counts_all():
    texts = [make_words(40) for _ in range(6)]
    part = " ".join(texts[0].split()[:30])
    test_index = make_index(one=texts, two=[texts[3], make_words(40)])
    long = f"{part} {' '.join(texts[1:5])}"
    _, values, hits = compare_texts(test_index, long, texts[3], texts[3])
    assert values[0] == "one question 2 (1.00)"  # of equal shares, the first one
    assert dict(hits.sets["one"].questions) == {1: 1, 2: 1, 3: 1, 4: 3, 5: 1}
    assert dict(hits.sets["two"].questions) == {1: 3}
    assert [hits.sets[name].documents for name in ("one", "two")] == [3, 3]
    samples = hits.sets["one"].samples
    assert [(sample.row, sample.question) for sample in samples] == [(0, 1), (0, 2), (0, 3)]
    assert samples[0].n_gram == " ".join(texts[0].split()[:8])
    assert samples[0].share == pytest.approx(23 / 33, abs=0.01)


def test_conversations_are_compared_by_the_turns_of_the_user():
    question = GETTYSBURG
    test_index = make_index(one=[question, make_words(30)])
    row = make_row(f"{question}\nA speech.", questions=[question])
    quoted = make_row(f"Which speech?\n{question}", questions=["Which speech?"])
    is_hit, _, hits = compare_rows(test_index, [row, quoted])
    assert is_hit == [True, False]
    assert hits.sets["one"].samples[0].n_gram.startswith("four score and seven")


def test_counts_of_several_units_are_added():
    texts = [make_words(30) for _ in range(8)]
    test_index = make_index(one=texts)
    total: dict = {}
    for number in range(4):
        long = make_row(texts[number], 2 * number)._replace(characters=10**9)
        _, _, hits = compare_rows(test_index, [long, make_row(texts[0], 2 * number + 1)])
        total = add_hits(total, json.loads(json.dumps(hits.to_json())))
    stored = TestHits.from_json(json.loads(json.dumps(total)))
    assert (stored.compared, stored.documents, stored.beginnings) == (8, 8, 4)
    assert dict(stored.sets["one"].questions) == {1: 5, 2: 1, 3: 1, 4: 1}
    samples = [(sample.source, sample.row) for sample in stored.sets["one"].samples]
    assert samples == [("a.txt", 0), ("a.txt", 1), ("a.txt", 2)]
    assert stored == TestHits.from_json(stored.to_json())


@pytest.mark.parametrize("text", ["", "a b", "one two three four five six seven"])
def test_a_text_shorter_than_an_n_gram_contains_no_question(text):
    test_index = make_index(one=[make_words(30), "one two three four five six seven " * 5])
    assert count_shares(test_index, text) == []
    assert compare_texts(test_index, text, text)[0] == [False, False]
