# covers: lib/curate/decontaminate/build.py, lib/curate/decontaminate/frequency.py
# covers: lib/curate/decontaminate/report.py, lib/curate/decontaminate/prepared.py
"""Stage 02 with --decontaminate: what it drops and reports, on several machines and after kills."""

from __future__ import annotations

import fcntl
import json
import random
import resource
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from lib.core.errors import DiskFullError
from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.curate.decontaminate import build as test_sets
from lib.curate.decontaminate import frequency
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
LICENCE = "permission is hereby granted free of charge to any person obtaining a copy of this text"


def make_words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_report(directory: Path) -> dict:
    return json.loads((directory / "decontamination.json").read_text())


def write_test_sets(root: Path) -> None:
    """Write test sets and files of which some contain a question, whole, in part or as quotation.

    `sets/quiz` occurs, `sets/inner/clean` does not, `sets/short` cannot be compared, and
    `sets/legal` contains a text that occurs in many rows.
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
    for number in range(12):
        texts = [make_words(draw, 60) for _ in range(20)]
        texts[3] += f" {quiz[number].upper()}"
        texts[5] = f"{LICENCE} {texts[5]} {LICENCE[::-1]}"
        texts[7] = " ".join(quiz[12 + number].split()[:29])  # 22 of 33 n-grams
        texts[9] = " ".join(quiz[24 + number].split()[:20])  # 13 of 33 n-grams
        write_lines(root / f"raw_text/{number}.jsonl", [{"text": text} for text in texts])


@pytest.mark.slow
def test_any_workers_and_machines_give_the_same_report_and_rows(stage, tmp_path):
    write_test_sets(tmp_path)
    stage("01_organize_data.py", "--num-dirs", 3)
    options = ("--decontaminate", "sets", "--validation-percent", 10)
    one = stage(SCRIPT, *options, "--save-dir", "one")
    expected = read_dataset_files(tmp_path / "one")
    assert len(expected["dropped.jsonl"].splitlines()) == 24
    assert "decontamination.json" in expected
    for count in (2, 3):
        stage(SCRIPT, *options, "--save-dir", f"out{count}", "--num-workers", count)
        assert read_dataset_files(tmp_path / f"out{count}") == expected
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", "1-2", "--num-workers", 2)
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", 0)
    shutil.copytree(tmp_path / "sets", tmp_path / "copied/sets")  # identified by content
    moved = ("--decontaminate", "copied/sets", *options[2:])
    stage(SCRIPT, *moved, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == expected
    assert "already done" in stage(SCRIPT, *moved, "--save-dir", "one").stdout

    write_lines(tmp_path / "sets/quiz.jsonl", [{"text": make_words(random.Random(9), 30)}])
    refused = stage(SCRIPT, *options, "--save-dir", "one", expect=2)
    assert "was made from other inputs or options" in refused.stderr
    assert "over 2 %" in one.stdout and "clean" in one.stdout


def test_the_report_names_what_occurs_and_what_cannot_be_compared(stage, tmp_path):
    write_test_sets(tmp_path)
    options = ("--data-folder", "raw_text", "--decontaminate", "sets")
    done = stage(SCRIPT, *options, "--save-dir", "out")
    assert "no question can be compared in 1 test set: short" in done.stdout
    assert "24 documents with questions of" in done.stdout
    report = read_report(tmp_path / "out")
    sets = {test_set["name"]: test_set for test_set in report["test_sets"]}
    assert [*sets] == ["quiz", "inner/clean", "legal", "short"]
    quiz = sets["quiz"]
    assert (quiz["questions"], quiz["hit"], quiz["share"]) == (40, 24, 0.6)
    assert quiz["documents"] == quiz["dropped"] == 24
    assert quiz["samples"][0] | {"n_gram": ""} == {
        "path": "0.jsonl",
        "position": 4,
        "question": 1,
        "share": 1.0,
        "n_gram": "",
    }
    assert len(quiz["samples"]) == 3 and len(quiz["samples"][0]["n_gram"].split()) == 8
    assert sets["short"]["unprotected"] == {"short": {"count": 2, "first": [1, 2]}}
    # The licence is in 12 of 240 rows, so it is frequent, and no row is dropped for it.
    assert sets["legal"]["unprotected"] == {"frequent": {"count": 1, "first": [1]}}
    assert report["frequent"]["rows"] == 240 and report["frequent"]["ignored"] > 9
    dropped = [json.loads(line) for line in (tmp_path / "out/dropped.jsonl").open()]
    by_file = {line["path"]: line["value"] for line in dropped if line["position"] == 8}
    assert by_file["3.jsonl"] == "quiz question 16 (0.67)"
    assert {line["rule"] for line in dropped} == {"test set"}
    summary = json.loads((tmp_path / "out/manifest.json").read_text())["summary"]
    assert summary["rules"]["test set"] == {"dropped": 24, "alone": 24}
    assert summary["decontamination"]["sets_above_limit"] == ["quiz"]
    assert summary["rows"] == 240 - 24
    page = (tmp_path / "out/report.html").read_text()
    assert "quiz: 60.0 % of its compared questions occur in documents." in page
    assert f"question 1: {quiz['samples'][0]['n_gram']}" in page

    only = stage(SCRIPT, *options, "--decontaminate-report-only", "--save-dir", "only")
    assert "none dropped for them" in only.stdout
    marked_report = read_report(tmp_path / "only")
    assert marked_report["test_sets"][0] == quiz | {"dropped": 0}
    summary = json.loads((tmp_path / "only/manifest.json").read_text())["summary"]
    assert summary["rows"] == 240 and (tmp_path / "only/dropped.jsonl").read_text() == ""


def test_conversations_are_dropped_by_the_question_of_the_user(stage, tmp_path):
    draw = random.Random(1)
    question = make_words(draw, 30)
    write_lines(tmp_path / "sets/quiz.jsonl", [{"question": question}, {"question": "short"}])
    pairs = [(question, "an answer"), ("what is it?", question), ("hello", "you")]
    rows = [{"prompt": question, "completion": answer} for question, answer in pairs]
    write_lines(tmp_path / "raw/chats.jsonl", rows)
    options = ("--format", "chat", "--data-folder", "raw", "--save-dir", "out")
    stage(SCRIPT, *options, "--decontaminate", "sets")
    with pa.ipc.open_stream((tmp_path / "out/data-00000-of-00001.arrow").read_bytes()) as stream:
        chats = stream.read_all()["messages"].to_pylist()
    assert [chat[0]["content"] for chat in chats] == ["what is it?", "hello"]
    assert read_report(tmp_path / "out")["test_sets"][0]["documents_by_question"] == {"1": 1}


def build_dataset(folder: Path, out: Path, shape: RowOptions, units: int | None = None) -> None:
    """Build a dataset in this process. units: it stops after them, as if killed."""
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir(exist_ok=True)
    prepared = test_sets.IndexBuilder(folder, files, 1, False)(shape)
    with DatasetWriter(out, prepared) as dataset:
        tasks = work_units.cut_files(folder, files, out / PARTS, prepared)
        for task in tasks[dataset.units : units]:
            dataset.add(work_units.process_unit(task))
        if units is None:
            dataset.finish()


def test_a_build_stopped_after_any_unit_gives_the_same_report(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(work_units, "UNIT_BYTES", 60_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)
    write_test_sets(tmp_path)
    lines = "".join((tmp_path / f"raw_text/{number}.jsonl").read_text() for number in range(12))
    (tmp_path / "raw_text/large.jsonl").write_text(lines)  # cut into spans
    shape = RowOptions(decontaminate=[tmp_path / "sets"])
    build_dataset(tmp_path / "raw_text", tmp_path / "whole", shape)
    expected = read_dataset_files(tmp_path / "whole")
    dropped = [json.loads(line) for line in expected["dropped.jsonl"].splitlines()]
    spots = [line["position"] for line in dropped if line["path"] == "large.jsonl"]
    assert spots == sorted(20 * n + place for n in range(12) for place in (4, 8))
    for stops in ([3], [1, 5]):
        for stop in stops:
            build_dataset(tmp_path / "raw_text", tmp_path / "out", shape, stop)
        build_dataset(tmp_path / "raw_text", tmp_path / "out", shape)
        assert read_dataset_files(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")


def test_the_sample_is_spread_over_a_large_input(tmp_path, monkeypatch):
    """It reads the first rows of some units, the same for any number of workers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(work_units, "UNIT_BYTES", 600_000)
    monkeypatch.setattr(frequency, "MOST_UNITS", 4)
    monkeypatch.setattr(frequency, "MOST_CHARACTERS", 4 * 100_000)
    write_test_sets(tmp_path)
    text = (tmp_path / "raw_text/0.jsonl").read_text()
    (tmp_path / "raw_text/large.jsonl").write_text(text * 320)  # 6,400 rows
    files, _ = inputs.find_inputs(tmp_path / "raw_text", False)
    shape = RowOptions(decontaminate=[tmp_path / "sets"], min_chars=10, dedup="near")
    test_set_lists = []
    for workers in (1, 3):
        builder = test_sets.IndexBuilder(tmp_path / "raw_text", files, workers, False)
        prepared = builder(shape)
        identity = test_sets.add_frequent({"options": {}}, prepared)
        test_set_lists.append((test_sets.index.read_sets(Path(prepared.test_index))[1], identity))
    assert test_set_lists[0] == test_set_lists[1]
    assert 750 < test_set_lists[0][0].rows < 900


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "contains no test set"),
        ({"a.json": "{}"}, "contains no test set"),
        ({"a.jsonl": '{"answer": "x"}\n'}, "expected a text in question, query, prompt, text"),
        ({"a.jsonl": "no json\n", "b.jsonl": "\n"}, "2 problems"),
        ({"a.jsonl": '{"question": "too short to be compared"}\n'}, "no question can be compared"),
    ],
)
def test_bad_test_sets_are_refused_before_anything_is_read(stage, tmp_path, content, words):
    (tmp_path / "raw_text").mkdir()
    (tmp_path / "raw_text/a.txt").write_text("text")
    (tmp_path / "sets").mkdir()
    for name, text in content.items():
        (tmp_path / "sets" / name).write_text(text)
    options = ("--data-folder", "raw_text", "--decontaminate", "sets")
    for more in ([], ["--dry-run"]):
        done = stage(SCRIPT, *options, *more, expect=2)
        assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf_datasets").exists()


def test_a_build_deletes_the_index_of_a_killed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "test-sets-killed").mkdir()
    (tmp_path / "test-sets-killed/lock").touch()
    (tmp_path / "test-sets-running").mkdir()
    with (tmp_path / "test-sets-running/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = test_sets.make_directory()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(["test-sets-running", directory.name])


def test_a_full_directory_for_temporary_files_is_named(tmp_path, monkeypatch):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/a.jsonl").write_text(
        json.dumps({"question": make_words(random.Random(0), 30)})
    )
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("text")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files, _ = inputs.find_inputs(tmp_path / "raw", False)
    prepare = test_sets.IndexBuilder(tmp_path / "raw", files, 1, False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as on a full disk
    try:
        with pytest.raises(DiskFullError, match=f"no room to write in {tmp_path} ") as caught:
            prepare(RowOptions(decontaminate=[tmp_path / "sets"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "TMPDIR=DIR" in caught.value.hint


def test_options_without_test_sets_are_refused(stage, tmp_path):
    (tmp_path / "raw_text").mkdir()
    options = ("--data-folder", "raw_text", "--decontaminate-share", 0.7)
    done = stage(SCRIPT, *options, "--decontaminate-report-only", expect=2)
    assert "--decontaminate-share needs --decontaminate DIR" in done.stderr
    assert "--decontaminate-report-only needs --decontaminate DIR" in done.stderr
