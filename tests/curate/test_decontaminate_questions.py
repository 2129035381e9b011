# covers: lib/curate/decontaminate/questions.py
"""The questions of test sets are read from JSON Lines, and all problems are reported at once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, StageError, UsageError
from lib.curate.decontaminate import questions


def write_lines(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read_questions(directory: Path) -> dict[str, list[tuple[int, str]]]:
    return {name: [*map(tuple, pairs)] for name, pairs in questions.read_sets([directory])}


def test_the_question_is_found_by_its_key(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "in a turn"}]
    write_lines(
        tmp_path / "a.jsonl",
        {"text": "a passage", "question": "of four keys, this one", "context": "c"},
        "",
        {"context": "of our own tasks", "choices": ["a", "b"], "gold": 0},
        {"prompt": turns, "id": 3},
        {"question": {"stem": "in an object", "choices": []}},
        {"text": ""},
    )
    write_lines(tmp_path / "inner/b.jsonl.gz", {"query": "compressed"})
    write_lines(tmp_path / ".hidden.jsonl", {"query": "hidden"})
    write_lines(tmp_path / "notes.txt", "text")
    assert read_questions(tmp_path) == {
        "a": [
            (1, "of four keys, this one"),
            (3, "of our own tasks"),
            (4, "in a turn"),
            (5, "in an object"),
            (6, ""),
        ],
        "inner/b": [(1, "compressed")],
    }
    assert list(questions.identify_sets([tmp_path])) == ["a", "inner/b"]
    assert read_questions(tmp_path / "a.jsonl").keys() == {"a"}


def test_requests_of_olmo_give_a_question_once_and_without_examples(tmp_path):
    def request(number: int, choice: int, document: dict) -> dict:
        context = f"Examples. Question: {number}?\nAnswer:"
        return {"doc_id": number, "idx": choice, "doc": document, "request": {"context": context}}

    place = tmp_path / "arc_easy/rc_5shot"
    write_lines(
        place / "requests.jsonl.gz",
        *(request(7, choice, {"query": "Question: seven?"}) for choice in range(4)),
        request(8, 0, {"goal": "no key"}),
        request(1_000_007, 0, {"query": "Question: seven?"}),
    )
    settings = {"metric_kwargs": {"uncond_docid_offset": 1_000_000}}
    (place / "config.json").write_text(json.dumps({"task_config": settings}))
    expected = [(7, "Question: seven?"), (8, "Examples. Question: 8?\nAnswer:")]
    assert read_questions(tmp_path) == {"arc_easy/rc_5shot": expected}
    assert read_questions(place) == {"rc_5shot": expected}


def test_bad_lines_of_all_files_are_reported_in_one_error(tmp_path):
    large = {"doc_id": 1 << 63, "request": {"context": "x"}}
    lines = {"answer": "x", "id": 1}, "{broken", "[1]", {"question": 5}, large
    write_lines(tmp_path / "a.jsonl", *lines)
    write_lines(tmp_path / "b.jsonl", {"question": "fine"})
    write_lines(tmp_path / "c.jsonl", "")
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UsageError) as refused:
        read_questions(tmp_path)
    text = refused.value.render()
    for part in (
        "3 problems",
        "line 1: expected a text in question, query, prompt, text or context, found answer, id",
        "line 2: it is not JSON",
        "line 3: expected a JSON object",
        "line 4: expected a text",
        "line 5: 'doc_id' must be a number of at most 63 bits",
        "c.jsonl contains no question",
        "line 1: it is not UTF-8",
    ):
        assert part in text
    assert "b.jsonl" not in text
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    with pytest.raises(ArtifactError, match=r"cut\.jsonl\.gz is damaged"):
        questions.read_questions(tmp_path / "cut.jsonl.gz")


def test_directories_without_test_sets_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "other/data.json", "{}")
    write_lines(tmp_path / "x/same.jsonl", {"text": "a"})
    write_lines(tmp_path / "y/same.jsonl", {"text": "b"})
    directories = [tmp_path / name for name in ("empty", "other", "absent", "x", "y")]
    with pytest.raises(StageError) as refused:
        questions.list_files(directories)
    text = refused.value.render()
    for part in (
        "an empty directory",
        "data.json",
        "absent does not exist",
        "two test sets are named same",
    ):
        assert part in text


def test_a_directory_that_is_given_twice_counts_once(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"question": "once"})
    assert [name for name, _ in questions.read_sets([tmp_path, tmp_path])] == ["a"]
