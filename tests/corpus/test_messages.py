# covers: lib/corpus/work_units.py, lib/corpus/tally.py, lib/corpus/row_options.py
# covers: lib/corpus/conversations.py, lib/corpus/inputs.py, lib/corpus/scan.py
# covers: lib/corpus/split_parts.py, lib/corpus/saved.py, lib/corpus/report.py
"""The wording of the messages of lib/corpus; other tests look for one keyword only."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from lib.core.conversation import InvalidConversation
from lib.core.errors import UsageError
from lib.corpus import conversations, report, saved, split_parts, work_units
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import RowOptions
from lib.corpus.scan import TreeEntry
from lib.corpus.tally import ChatTally, Tally
from lib.corpus.work_units import FileSpan, UnitResult, WorkUnit
from tests.conftest import message_lines

RUN = "python 02_build_hf_dataset.py --data-folder raw"
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", RUN.split()[1:])


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ([USER, 5], {}, "turn 2 is a number, expected an object with role and content"),
        ([USER, {"role": "assistant", "content": 5}], {}, "the content of turn 2 is a number"),
        ("{", {}, "messages is a string that is not JSON"),
        (5, {}, "messages is a number, expected a list"),
        ([USER, ANSWER], {"tools": 5}, "tools is a number, expected a list of objects"),
        ([USER, ANSWER], {"weights": [1]}, "found 1 weights for 2 turns"),
        ([USER, ANSWER], {"weights": [1, 2]}, "a weight is not 0 or 1"),
        (
            [USER, {**ANSWER, "tool_calls": [{}]}],
            {},
            "a function call of turn 2 names no function",
        ),
    ],
)
def test_a_record_that_is_refused(messages: object, more: dict, message: str) -> None:
    with pytest.raises(InvalidConversation) as caught:
        conversations.parse_record({"messages": messages, **more}, "messages")
    assert str(caught.value) == message


def test_an_unknown_role() -> None:
    with pytest.raises(InvalidConversation) as caught:
        conversations.parse_record({"messages": [{**USER, "role": "boss"}]}, "messages")
    assert str(caught.value).startswith("turn 1 has the role 'boss'; known roles: ")
    assert str(caught.value).endswith("and aliases such as human and gpt")


def test_a_file_with_two_formats() -> None:
    tally = ChatTally()
    tally.note_format("a.jsonl", "messages", 1)
    tally.note_format("a.jsonl", "alpaca", 7)
    error = tally.find_mixture()
    assert error is not None
    assert message_lines(error) == [
        "error: a.jsonl mixes formats of conversations",
        "expected: one format per file",
        "found:    a.jsonl: messages in line 1, alpaca in line 7",
        "hint:     put each format into its own file",
    ]


def test_a_file_that_changed() -> None:
    file = InputFile("a.jsonl", "a.jsonl", 10, 0)
    unit = WorkUnit(0, (FileSpan(file, 10),), "raw", "out", RowOptions())
    change = "it contained 10 bytes when it was listed, now 5"
    with pytest.raises(UsageError) as caught:
        work_units.require_unchanged(UnitResult(unit, changed=("a.jsonl", change)))
    assert message_lines(caught.value) == [
        "error: a.jsonl changed while it was read; nothing was published",
        f"found:    {change}",
        "hint:     when no other process writes to raw:",
    ]


def test_only_splits_without_splits() -> None:
    with pytest.raises(UsageError) as caught:
        split_parts.select_splits([""], [0])
    assert message_lines(caught.value) == [
        "error: --only-splits needs the splits of stage 01",
        "found:    a plain directory",
        "hint:     run stage 01 on it first",
    ]


def test_a_saved_dataset_with_two_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["en", "de"]}))
    entries = [TreeEntry(name) for name in ("dataset_dict.json", "en/a.arrow", "de/a.arrow")]
    with pytest.raises(UsageError) as caught:
        saved.require_readable(tmp_path, "--data-folder", entries)
    assert message_lines(caught.value) == [
        f"error: {tmp_path} contains several splits of a dataset, which would all be trained on",
        "expected: a single split",
        "found:    de, en",
        "hint:     read one split:",
    ]


def test_warnings_about_a_dataset() -> None:
    tally = Tally(
        documents=2,
        short=9,
        lines_lost=3,
        problems=Counter({"no string": 23, "quote": 1}),
    )
    tally.other_fields["body"] = 23
    options = RowOptions(fields=["text"], min_chars=5, validation_percent=1)
    rows = {"train": 2, "validation": 0}
    assert report.list_warnings(tally, options, rows, 0, Path("out")) == [
        "--fields: no document has 'text'\n"
        "other fields with text, the most frequent first: body (23)",
        "--fields text found text in only 2 of 25 documents (8.0 %)\n"
        "other fields with text, the most frequent first: body (23)",
        "3 lines of CSV lost because of unclosed quotes; errors.jsonl lists the files and lines",
        "1 row of CSV may contain several rows because of an unclosed quote; errors.jsonl lists "
        "the files and lines",
        "--min-chars 5 dropped 9 of 11 rows (82 %)",
        "the validation split is empty: the corpus is too small for --validation-percent 1",
    ]
