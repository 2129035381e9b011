# covers: lib/curate/decontaminate/build.py, lib/curate/decontaminate/frequency.py
# covers: lib/curate/decontaminate/report.py, lib/curate/steps/decontaminate.py
"""A curation with --decontaminate: what it drops and reports, in units and after kills."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from lib.curate import reader
from lib.curate.decontaminate import frequency, index
from lib.curate.steps.decontaminate import DecontaminateOptions, Decontamination
from tests.curate.curations import (
    curate,
    curate_in_units,
    read_dropped,
    read_rows,
    write_chats,
    write_texts,
)
from tests.training import read_dataset_files

LICENCE = "permission is hereby granted free of charge to any person obtaining a copy of this text"


def make_words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_questions(path: Path, *questions: str) -> None:
    write_lines(path, [{"question": question} for question in questions])


def read_report(directory: Path) -> dict:
    return json.loads((directory / "decontamination.json").read_text())


def make_texts(root: Path) -> list[str]:
    """Write test sets, and return texts of which some contain a question, whole or in part.

    `sets/quiz` occurs, `sets/inner/clean` does not, `sets/short` cannot be compared, and
    `sets/legal` contains a question that consists of two sentences which stand in many rows.
    """
    draw = random.Random(0)
    quiz = [make_words(draw, 40) for _ in range(40)]
    rows = [{"question": f"Answer with one word: {text}", "choices": ["a", "b"]} for text in quiz]
    write_lines(root / "sets/quiz.jsonl", rows)
    clean = [{"text": make_words(draw, 30)} for _ in range(5)]
    write_lines(root / "sets/inner/clean.jsonl", clean)
    write_lines(root / "sets/short.jsonl", [{"text": "who are you"}, {"text": "one two"}])
    legal = [{"prompt": f"{LICENCE} {LICENCE[::-1]}"}, {"prompt": make_words(draw, 25)}]
    write_lines(root / "sets/legal.jsonl", legal)
    everything = []
    for number in range(12):
        texts = [make_words(draw, 60) for _ in range(20)]
        texts[3] += f" {quiz[number].upper()}"
        texts[5] = f"{LICENCE} {texts[5]} {LICENCE[::-1]}"
        texts[7] = " ".join(quiz[12 + number].split()[:29])  # 22 of 33 n-grams
        texts[9] = " ".join(quiz[24 + number].split()[:20])  # 13 of 33 n-grams
        everything += texts
    return everything


@pytest.mark.slow
def test_any_workers_and_machines_give_the_same_report_and_rows(tmp_path):
    texts = make_texts(tmp_path)
    write_texts(tmp_path / "raw", texts[:40], "validation")
    write_texts(tmp_path / "raw", texts[40:])
    options = ("raw", "--decontaminate", "sets")
    one = curate_in_units(tmp_path, *options, "--save-dir", "one", "--num-workers", 1)
    expected = read_dataset_files(tmp_path / "one")
    dropped = read_dropped(tmp_path / "one")
    assert [(line["split"], line["row"]) for line in dropped[:5]] == [
        *(("validation", row) for row in (3, 7, 23, 27)),
        ("train", 3),
    ]
    assert len(dropped) == 24
    assert read_report(tmp_path / "one")["test_sets"][0]["samples"][0]["split"] == "validation"
    assert "over 2 %" in one.stdout and "clean" in one.stdout
    curate_in_units(tmp_path, *options, "--save-dir", "three", "--num-workers", 3)
    assert read_dataset_files(tmp_path / "three") == expected

    for more in (["--part", "1/2"], ["--part", "2/2"], ["--merge"]):
        curate_in_units(tmp_path, *options, "--save-dir", "many", *more)
    assert read_dataset_files(tmp_path / "many") == expected

    shutil.copytree(tmp_path / "sets", tmp_path / "copied/sets")  # identified by content
    moved = ("raw", "--decontaminate", "copied/sets", "--save-dir", "one")
    assert "already done" in curate(tmp_path, *moved).stdout
    write_questions(tmp_path / "sets/quiz.jsonl", make_words(random.Random(9), 30))
    refused = curate(tmp_path, *options, "--save-dir", "one", expect=2)
    assert "other inputs or options" in refused.stderr


@pytest.mark.slow
def test_the_report_names_what_occurs_and_what_cannot_be_compared(tmp_path):
    write_texts(tmp_path / "raw", make_texts(tmp_path))
    options = ("raw", "--decontaminate", "sets")
    done = curate(tmp_path, *options, "--save-dir", "out")
    assert "in 1 test set: short" in done.stdout
    assert "24 documents with" in done.stdout
    report = read_report(tmp_path / "out")
    totals = json.loads((tmp_path / "out/manifest.json").read_text())["summary"]["decontamination"]
    assert totals.items() <= report.items() and totals["documents"] == 24
    sets = {test_set["name"]: test_set for test_set in report["test_sets"]}
    assert [*sets] == ["quiz", "inner/clean", "legal", "short"]
    quiz = sets["quiz"]
    assert (quiz["questions"], quiz["hit"], quiz["share"]) == (40, 24, 0.6)
    assert quiz["documents"] == quiz["dropped"] == 24
    sample = {"split": "train", "row": 3, "source": "", "question": 1, "share": 1.0}
    assert quiz["samples"][0] | {"n_gram": ""} == sample | {"n_gram": ""}
    assert len(quiz["samples"]) == 3 and len(quiz["samples"][0]["n_gram"].split()) == 8
    assert sets["short"]["unprotected"] == {"short": {"count": 2, "first": [1, 2]}}
    # No row contains the question of two sentences, but both are in 12 of 240 rows.
    assert sets["legal"]["unprotected"] == {"frequent": {"count": 1, "first": [1]}}
    assert sets["legal"]["frequent"] == [{"question": 1, "sampled_documents": 12}]
    assert report["frequent"]["rows"] == 240 and report["frequent"]["ignored"] > 9
    dropped = read_dropped(tmp_path / "out")
    assert {line["row"]: line["value"] for line in dropped}[67] == "quiz question 16 (0.67)"
    assert {line["rule"] for line in dropped} == {"test set"}
    assert len(read_rows(tmp_path / "out")) == 240 - 24

    only = curate(tmp_path, *options, "--decontaminate-report-only", "--save-dir", "only")
    assert "none dropped for them" in only.stdout
    assert read_report(tmp_path / "only")["test_sets"][0] == quiz | {"dropped": 0}
    assert len(read_rows(tmp_path / "only")) == 240 and not read_dropped(tmp_path / "only")


def test_conversations_are_dropped_by_the_question_of_the_user(tmp_path):
    draw = random.Random(1)
    question = make_words(draw, 30)
    write_questions(tmp_path / "sets/quiz.jsonl", question, "short")
    pairs = [(question, "an answer"), ("what is it?", question), ("hello", "you")]
    chats = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in pairs
    ]
    write_chats(tmp_path / "raw", chats)
    curate(tmp_path, "raw", "--save-dir", "out", "--decontaminate", "sets")
    kept_chats = read_rows(tmp_path / "out")["messages"].to_pylist()
    assert [chat[0]["content"] for chat in kept_chats] == ["what is it?", "hello"]
    assert read_report(tmp_path / "out")["test_sets"][0]["documents_by_question"] == {"1": 1}


def prepare_index(root: Path, texts: Sequence[str], *questions: str) -> index.Index:
    """Write texts and a test set, and return the index that the texts are compared with."""
    write_texts(root / "raw", texts)
    write_questions(root / "sets/quiz.jsonl", *questions)
    step = Decontamination.from_options(DecontaminateOptions(decontaminate=[root / "sets"]))
    assert step
    step.prepare(reader.open_source(root / "raw"), root / "work", progress=False)
    return index.open_index(step.index_path)


@pytest.mark.slow
def test_copies_of_a_question_are_found_however_many_there_are(tmp_path):
    """A licence text stays, and so does a phrase that many rows share with a question."""
    draw = random.Random(2)
    licence = make_words(draw, 60)
    phrase = make_words(draw, 12)
    questions = [make_words(draw, 60) for _ in range(3)]
    questions += [licence, f"{make_words(draw, 20)} {phrase} {make_words(draw, 20)}"]
    texts = [make_words(draw, 150) for _ in range(1500)]
    copies = {0: 5, 1: 12, 4: 15}
    row = 0
    for question, count in copies.items():
        for _ in range(count):
            texts[row] += f" {questions[question]}"
            row += 1
    assert row == 32
    for number in range(40, 490):  # 30 %
        texts[number] = f"{licence} {texts[number]}"
    for number in range(500, 600):
        texts[number] += f" {phrase}"
    write_texts(tmp_path / "raw", texts)
    write_questions(tmp_path / "sets/quiz.jsonl", *questions)
    curate(tmp_path, "raw", "--save-dir", "out", "--decontaminate", "sets")
    assert [line["row"] for line in read_dropped(tmp_path / "out")] == [*range(32)]
    (quiz,) = read_report(tmp_path / "out")["test_sets"]
    assert quiz["documents_by_question"] == {"1": 5, "2": 12, "5": 15}
    assert quiz["unprotected"] == {"frequent": {"count": 1, "first": [4]}}
    assert quiz["frequent"] == [{"question": 4, "sampled_documents": 450}]


def test_a_frequent_question_that_stays_is_a_problem(tmp_path):
    """Half of a question in many rows may be a phrase, so it is reported, and not dropped."""
    draw = random.Random(3)
    question = make_words(draw, 60)
    half = " ".join(question.split()[:36])  # 29 of 53 n-grams
    texts = [f"{make_words(draw, 30)} {half}" for _ in range(12)]
    test_index = prepare_index(tmp_path, texts, question, make_words(draw, 30))
    assert test_index.frequent[:4] == (12, 10, 10, 29)
    assert test_index.test_sets[0].frequent == [[1, 12]]
    assert prepare_index(tmp_path, texts[:10], question).frequent.ignored == 0
    step = Decontamination((), 0.5, False, tmp_path / "work/index")
    assert not next(iter(step.list_sections({}))).problems

    prepare_index(tmp_path, texts, question)
    (problem,) = next(iter(step.list_sections({}))).problems
    assert "question 1 in 12" in problem
    assert "  frequent" in step.format_lines({})


def test_equal_texts_count_once_in_the_sample(tmp_path):
    draw = random.Random(4)
    phrase = make_words(draw, 12)
    question = f"{phrase} {make_words(draw, 40)}"
    texts = [make_words(draw, 30) for _ in range(5)] + [f"{phrase} {make_words(draw, 9)}"] * 50
    assert prepare_index(tmp_path, texts, question).frequent[:4] == (6, 10, 10, 0)


def test_the_sample_is_spread_over_a_large_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "UNIT_BYTES", 30_000)
    monkeypatch.setattr(frequency, "MOST_UNITS", 4)
    monkeypatch.setattr(frequency, "MOST_CHARACTERS", 4 * 10_000)
    draw = random.Random(5)
    texts = [make_words(draw, 60) for _ in range(1000)]  # 100 characters per row and unit
    sampled = prepare_index(tmp_path, texts, make_words(draw, 30)).frequent.rows
    assert 4 * 20 <= sampled <= 4 * 30


def test_an_index_that_a_killed_process_left_is_built_again(tmp_path):
    draw = random.Random(6)
    texts = [make_words(draw, 30) for _ in range(30)]
    first = prepare_index(tmp_path, texts, texts[0]).hashes.tolist()
    (tmp_path / "work/index/hashes.npy").write_bytes(b"\x93NUMPY")
    again = prepare_index(tmp_path, texts, texts[0])
    assert again.hashes.tolist() == first


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "contains no test set"),
        ({"a.json": "{}"}, "contains no test set"),
        ({"a.jsonl": '{"answer": "x"}\n'}, "question, query, prompt, text"),
        ({"a.jsonl": "no json\n", "b.jsonl": "\n"}, "2 problems"),
        ({"a.jsonl": '{"question": "too short to be compared"}\n'}, "can be compared"),
    ],
)
def test_bad_test_sets_are_refused_before_anything_is_read(tmp_path, content, words):
    write_texts(tmp_path / "raw", ["text"])
    (tmp_path / "sets").mkdir()
    for name, text in content.items():
        (tmp_path / "sets" / name).write_text(text)
    for more in ([], ["--dry-run"]):
        options = ("raw", "--save-dir", "out", "--decontaminate", "sets", *more)
        done = curate(tmp_path, *options, expect=2)
        assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_options_without_test_sets_are_refused(tmp_path):
    options = ("raw", "--decontaminate-share", 0.7, "--decontaminate-report-only")
    done = curate(tmp_path, *options, expect=2)
    assert "--decontaminate-share needs --decontaminate DIR" in done.stderr
    assert "--decontaminate-report-only needs --decontaminate DIR" in done.stderr
