# covers: 02_build_hf_dataset.py, lib/corpus/chat_documents.py, lib/corpus/tool_calls.py
# covers: lib/corpus/conversations.py
"""Run stage 02 with --format chat from the command line."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lib.corpus import dataset as dataset_module
from lib.corpus import shards, work_units
from lib.corpus.row_options import RowOptions
from tests.test_stage_02_machines import build_dataset
from tests.training import load_dataset, read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
CHAT = ("--format", "chat")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"n": 3}}}


def records(style: str, count: int) -> list[dict]:
    """Return conversations in a format; some are repeated, some are not valid."""
    draw = random.Random(f"{style} {count}")
    chats = []
    for number in range(count):
        question = f"{style} {count} {number}?"
        drawn = draw.random()
        answer = f"answer {drawn} é" if number % 9 != 0 else ""
        chats.append(
            {
                "messages": {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer, "weight": 1},
                    ],
                    "tools": [{"name": "f", "parameters": {}}],
                },
                "calls": {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "tool_calls": [CALL]},
                    ]
                },
                "sharegpt": {
                    "conversations": [
                        {"from": "human", "value": question},
                        {"from": "gpt", "value": answer},
                    ]
                },
                "completion": {"prompt": question, "completion": answer},
                "alpaca": {"instruction": question, "input": "", "output": answer},
            }[style]
        )
    return [
        chats[draw.randrange(count)] if number % 10 == 7 else record
        for number, record in enumerate(chats)
    ]


def write_conversations(root: Path, count: int = 40) -> None:
    """Write files of every format, and one without conversations."""
    root.mkdir()
    for style in ("messages", "calls", "sharegpt", "completion"):
        for number in range(4):
            (root / f"{style}{number}.jsonl").write_text(
                "".join(json.dumps(record) + "\n" for record in records(style, count + number))
                + "bad\n"
            )
    (root / "alpaca.json").write_text(json.dumps(records("alpaca", count), indent=1))
    (root / "notes.txt").write_text("plain text")


def test_from_conversations_to_a_dataset(stage, tmp_path):
    write_conversations(tmp_path / "raw_text")
    stage("01_organize_data.py", "--num-dirs", 3)
    options = (*CHAT, "--dedup", "exact", "--validation-percent", 20)
    done = stage(SCRIPT, *options, "--num-workers", 1)
    path = tmp_path / "hf_datasets/corpus"
    dataset = load_dataset(path)
    rows = [row for split in dataset.values() for row in split]
    assert len(rows) == json.loads((path / "manifest.json").read_text())["summary"]["rows"] > 400
    [called] = [row for row in rows if row["source"] == "calls0.jsonl" and row["line"] == 1]
    assert called["messages"][1]["content"] == "" and called["offset"] == 0
    assert json.loads(called["messages"][1]["tool_calls"]) == [CALL]
    [second_row] = [row for row in rows if row["source"] == "messages1.jsonl" and row["line"] == 2]
    assert (
        second_row["weights"] == [1.0, 1.0]
        and json.loads(second_row["tools"])[0]["type"] == "function"
    )

    problems = [json.loads(line) for line in (path / "errors.jsonl").read_text().splitlines()]
    for problem in problems:
        if problem["kind"] == "empty answer":
            lines = (tmp_path / "splits" / problem["path"]).read_text().splitlines()
            assert '""' in lines[problem["line"] - 1] or problem["path"].endswith("json")
    kinds = {problem["kind"] for problem in problems}
    assert kinds == {"empty answer", "syntax", "no conversation", "duplicate"}

    chat = json.loads((path / "manifest.json").read_text())["summary"]["chat"]
    assert {name: counts["files"] for name, counts in chat["formats"].items()} == {
        "messages": 8,
        "ShareGPT conversations": 4,
        "prompt/completion": 4,
        "alpaca": 1,
    }
    assert [path.rpartition("/")[2] for path in chat["formats"]["alpaca"]["paths"]] == [
        "alpaca.json"
    ]
    assert chat["dropped"]["empty answer"] > 40 and chat["mean_turns"] == 2
    assert chat["turns"] == {"user": chat["conversations"], "assistant": chat["conversations"]}
    for words in (
        "messages in 8 files (",
        "alpaca in 1 file (",
        "user, ",
        "2.0 per conversation",
        "with tools",
        f"{chat['dropped']['empty answer']} empty answer",
        "-d hf_datasets/corpus --prepare-only",
    ):
        assert words in done.stdout
    assert "already done" in stage(SCRIPT, *options).stdout

    for part in ("--only-splits 0-1", "--only-splits 2 --num-workers 3", "--merge"):
        stage(SCRIPT, *options, "--save-dir", "many", *part.split())
    assert read_dataset_files(tmp_path / "many") == read_dataset_files(path)
    refused = stage(SCRIPT, *options[2:], expect=2)
    assert "--format: chat there, not given now" in refused.stderr


@pytest.mark.slow
def test_inputs_without_conversations_are_refused(stage, tmp_path):
    raw = tmp_path / "raw"
    write_conversations(raw)
    mixed = (
        "".join(json.dumps(record) + "\n" for record in records("completion", 300)).replace(
            "answer ", "answer " * 1000
        )
        * 18
    )
    (raw / "long.jsonl").write_text(mixed + json.dumps(records("alpaca", 2)[1]) + "\n")
    count = mixed.count("\n")
    assert (raw / "long.jsonl").stat().st_size > 2 * work_units.UNIT_BYTES
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"question": "q", "answer": "a"}\n"x"\n')
    (tmp_path / "text/b.md").write_text("text")
    stage("01_organize_data.py", "--src-dir", raw, "--dst-root", "splits", "--num-dirs", 2)
    split = next(path.parent.name for path in (tmp_path / "splits").glob("*/long.jsonl"))
    pattern = rf"long.jsonl: prompt/completion in line 1, alpaca in line {count + 1:,}"
    for arguments, *words in (
        (("--data-folder", "raw"), "long.jsonl mixes formats", pattern),
        (("--only-splits", split[-1]), "long.jsonl mixes formats", pattern),
        (
            ("--data-folder", "text"),
            "no record in text",
            "a.jsonl, line 1:",
            "question, answer",
            "b.md, line 1:",
            "--format chat",
        ),
        (("--fields", "a"), "--fields and --format chat"),
        (("--strings", "rows"), "--strings and --format chat"),
        (("--data-folder", "raw", "--min-chars", 10**6), "rows dropped by --min-chars"),
    ):
        done = stage(SCRIPT, *CHAT, "--save-dir", "out", *arguments, expect=2)
        assert all(word in done.stderr for word in words), done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.parts/*/*.train"))
        if "text" in arguments:
            (raw / "long.jsonl").unlink()


def test_conversations_read_as_plain_text_are_reported(stage, tmp_path):
    write_conversations(tmp_path / "raw")
    done = stage(SCRIPT, "--data-folder", "raw", "--save-dir", "out", "--strings", "rows")
    [warning, command] = re.findall(r"warning: .*|^ .* --format chat .*", done.stdout, re.MULTILINE)
    assert "messages, prompt/completion, ShareGPT conversations, alpaca" in warning
    identity = json.loads((tmp_path / "out/manifest.json").read_text())["identity"]["options"]
    assert "format" not in identity  # datasets of text from before are those of now
    stage(SCRIPT, *shlex.split(command.partition(SCRIPT)[2]))
    assert load_dataset(tmp_path / "out-chat").column_names[0] == "messages"
    shutil.rmtree(tmp_path / "raw")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"text": "t", "messages": 3, "prompt": "p"}\n' * 9)
    done = stage(SCRIPT, "--data-folder", "raw", "--save-dir", "other")
    assert "--format chat" not in done.stdout


@pytest.mark.parametrize("dedup", ["none", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_build_stopped_after_any_unit_gives_the_same_bytes(tmp_path, monkeypatch, dedup):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 3_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 500)
    shape = RowOptions(validation_percent=20, dedup=dedup, format="chat")
    write_conversations(tmp_path / "raw", 100)
    (tmp_path / "raw/z.jsonl").write_text('{"messages": []}\n{"prompt": "", "completion": ""}\n')
    build_dataset(tmp_path / "raw", tmp_path / "whole", shape)
    expected = read_dataset_files(tmp_path / "whole")
    assert len([name for name in expected if name.startswith("train/data-")]) > 3
    for stops in ([3], [1, 1, 7], [5, 22]):
        for stop in stops:
            build_dataset(tmp_path / "raw", tmp_path / "out", shape, stop)
        tally = build_dataset(tmp_path / "raw", tmp_path / "out", shape)
        assert read_dataset_files(tmp_path / "out") == expected
        assert tally.chat.mixed == {"z.jsonl": (("messages", 1), ("prompt/completion", 2))}
        assert len(tally.chat.formats) == 18 and tally.chat.counts.turns["user"] > 1000
        shutil.rmtree(tmp_path / "out")
