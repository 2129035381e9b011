# covers: lib/evaluate/tasks.py, lib/evaluate/small_tasks.py, lib/core/json_lines.py
"""Suites of tasks are read, and all problems in bad files are reported at once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.evaluate import small_tasks, tasks
from lib.evaluate.tasks import Item, Request

CHOICE = {"context": "1 + 1 =", "choices": ["1", "2"], "gold": 1}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path.parent


def test_the_files_of_the_small_suite_are_those_that_the_script_writes() -> None:
    files = small_tasks.make_files()
    directory = tasks.find_suite("small")
    assert {path.name: path.read_text() for path in directory.iterdir()} == files
    assert all(len(text) < 20_000 for text in files.values())
    suite = tasks.read_suite(directory)
    assert [task.name for task in suite] == sorted(small_tasks._TASKS) and len(suite) == 6
    for task in suite:
        assert task.metric == "accuracy" and task.licence == "MIT (this repository)"
        for item in task.items:  # no choice is given twice
            assert len(set(item.requests)) == len(item.requests)


def test_own_files_with_headers(tmp_path: Path) -> None:
    write_lines(tmp_path / "sums.jsonl", CHOICE, {**CHOICE, "context": "2 + 0 =\n", "id": 7})
    (tmp_path / "sums.yaml").write_text("metric: accuracy_per_char\nlicense: CC0\n")
    # `gold` is ignored beside an answer, like other fields.
    answers = (
        {"context": "Größe: ", "answer": "groß 🙂", "gold": 3},
        {"context": "", "answer": "日本", "gold": "B"},
    )
    write_lines(tmp_path / "words.jsonl", *answers)
    zipped = tmp_path / "zipped.jsonl.gz"
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(CHOICE).encode() + b"\n\n"))
    (tmp_path / "zipped.json").write_text('{"delimiter": "", "source": "us"}')
    (tmp_path / "notes.txt").write_text("no task")
    sums, words, compressed = tasks.read_suite(tmp_path)
    assert sums.items[0] == Item((Request("1 + 1 =", " 1"), Request("1 + 1 =", " 2")), 1)
    assert sums.items[1].requests[0] == Request("2 + 0 =\n", "1")  # space is there already
    assert (sums.metric, sums.licence, sums.chance) == ("accuracy_per_char", "CC0", 0.5)
    assert [item.requests for item in words.items] == [
        (Request("Größe: ", "groß 🙂"),),
        (Request("", "日本"),),
    ]
    assert [item.gold for item in words.items] == [0, 0]
    assert (words.metric, words.chance) == ("bits_per_byte", None)
    assert words.keys() == ["eval/words/bits_per_byte"]
    assert compressed.items[0].requests[0].continuation == "1" and compressed.source == "us"
    assert [len(task.items) for task in tasks.read_suite(tmp_path, limit=1)] == [1, 1, 1]


PER_CHAR = "accuracy_per_char"


def test_all_problems_of_all_files_are_reported_with_their_lines(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "bad.jsonl",
        CHOICE,
        {"choices": ["a", "b"], "gold": 0},
        {**CHOICE, "gold": 2},
        {**CHOICE, "gold": True},
        {**CHOICE, "choices": ["a"]},
        {**CHOICE, "choices": ["a", ""]},
        {**CHOICE, "choices": ["a", 2]},
        [1],
        {"context": "x"},
        {"context": "\ud800", "answer": "a"},
        {"context": "x", "answer": "a"},
    )
    (tmp_path / "bytes.jsonl").write_bytes(b"{\xff}\nnot json\n" + b"[" * 5000 + b"\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "two words.jsonl").write_text("{}\n")
    write_lines(tmp_path / "header.jsonl", {"context": "x", "answer": "a"})
    (tmp_path / "header.yaml").write_text("metric: f1\ncolour: red\nlicence: [1]\n")
    write_lines(tmp_path / "metric.jsonl", {"context": "x", "answer": "a"})
    (tmp_path / "metric.json").write_text('{"metric": "accuracy"}')
    write_lines(tmp_path / "twice.jsonl", CHOICE)
    (tmp_path / "twice.jsonl.gz").write_bytes(gzip.compress(json.dumps(CHOICE).encode()))
    with pytest.raises(UsageError) as caught:
        tasks.read_suite(tmp_path)
    text = caught.value.render()
    for expected in (
        "line 2: 'context' is missing",
        "line 3: 'gold' must be an index from 0 to 1, found 2",
        "line 4: 'gold' must be an index from 0 to 1, found true or false",
        "line 5: 'choices' must be a list of at least two strings",
        "line 6: 'choices[1]' is empty",
        "line 7: 'choices[1]' must be a string, found a number",
        "line 8: expected a JSON object, found a list",
        "line 9: it needs either",
        "line 10: 'context' contains a lone surrogate",
        "line 11: all lines of a task must have 'choices'",
        "line 1: it is not UTF-8",
        "line 2: it is not JSON",
        "line 3: it is not JSON (it is nested",
        "empty.jsonl contains no item",
        "two words.jsonl cannot name a task",
        "unknown metric 'f1'",
        "unknown key 'colour'",
        "licence must be a text, found a list",
        "metric.jsonl is accuracy, but its lines have no choices",
        "several files for the task twice",
    ):
        assert expected in text


@pytest.mark.parametrize("name", ["loss", "perplexity", "bits_per_byte"])
def test_a_task_cannot_have_the_name_of_another_figure(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.jsonl").write_text('{"context": "a", "answer": "b"}\n')
    with pytest.raises(UsageError, match=f"be named {name}"):
        tasks.read_suite(tmp_path)


def test_a_damaged_file_is_no_bad_usage(tmp_path: Path) -> None:
    archive = gzip.compress(json.dumps(CHOICE).encode() * 100)
    (tmp_path / "cut.jsonl.gz").write_bytes(archive[: len(archive) // 2])
    with pytest.raises(ArtifactError, match=r"cut\.jsonl\.gz is damaged"):
        tasks.read_suite(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 7\n"
    )
    with pytest.raises(ArtifactError) as damaged:
        tasks.read_suite(tmp_path)
    assert "git lfs pull" in damaged.value.found


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "eval" / "mine").mkdir(parents=True)
    with pytest.raises(UsageError) as caught:
        tasks.find_suite("other", tmp_path)
    assert "no suite other" in caught.value.render() and "mine" in caught.value.render()
    assert tasks.find_suite("mine", tmp_path) == tmp_path / "eval" / "mine"
    with pytest.raises(UsageError, match="contains no task"):
        tasks.read_suite(tmp_path)
