# covers: lib/corpus/conversations.py, lib/corpus/json_data.py, lib/corpus/tool_calls.py
# covers: lib/core/conversation.py, lib/corpus/turn_keys.py
"""Conversations of all formats become rows; other records are refused with a reason."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.core.conversation import Conversation, Place
from lib.corpus import conversations, json_data, work_units
from tests.test_hostile_records import VALUES, changed, places

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10}}}


def make_call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def parquet(records: list[Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=2)
    return sink.getvalue()


CALLING = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [make_call({"x": 1, "y": 2.5})]},
    {"role": "tool", "content": "3"},
    ANSWER,
]
# By format: a record, and the messages, tools and weights of its conversation.
RECORDS: dict[str, list[tuple[Any, Any, Any, Any]]] = {
    "messages": [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER], None, None),
        ({"messages": [USER, ANSWER], "system": "s"}, [SYSTEM, USER, ANSWER], None, None),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "x"}, [SYSTEM, USER, ANSWER], None, None),
        (
            {"messages": [{"role": "system", "content": ""}, USER, ANSWER]},
            [{"role": "system", "content": ""}, USER, ANSWER],
            None,
            None,
        ),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER], None, None),
        (
            {"messages": [SYSTEM, {"role": "developer", "content": "d"}, USER, ANSWER]},
            [SYSTEM, {"role": "developer", "content": "d"}, USER, ANSWER],
            None,
            None,
        ),
        (
            {"messages": [{"role": "Human", "content": "q"}, {"role": "model", "content": "a"}]},
            [USER, ANSWER],
            None,
            None,
        ),
        (
            {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, ANSWER],
            None,
            None,
        ),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER], None, None),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}, {"text": "!"}]},
                    {**ANSWER, "reasoning_content": "r", "name": "n"},
                ]
            },
            [{"role": "user", "content": "q!"}, {**ANSWER, "reasoning_content": "r", "name": "n"}],
            None,
            None,
        ),
        (
            {"messages": [USER, {**ANSWER, "thinking": "r", "refusal": None}]},
            [USER, {**ANSWER, "reasoning_content": "r"}],
            None,
            None,
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"name": "f", "arguments": '{"x": 1, "y": 2.5}'}],
                    },
                    {"role": "ipython", "content": "3"},
                    ANSWER,
                ],
                "tools": [WEATHER],
            },
            [
                USER,
                {**CALLING[1], "tool_calls": [make_call('{"x": 1, "y": 2.5}')]},
                *CALLING[2:],
            ],
            [WEATHER],
            None,
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "function_call": {"name": "f", "arguments": {"x": 1, "y": 2.5}},
                    },
                    {"role": "function", "content": "3"},
                    ANSWER,
                ],
                "functions": [{"type": "function", **WEATHER["function"]}],
            },
            CALLING,
            [WEATHER],
            None,
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            make_call(
                                {"big": 2**70 + 1, "null": None, "deep": [[{"a": [1, True]}]]},
                                id="c",
                            )
                        ],
                    },
                ]
            },
            [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        make_call(
                            {"big": 2**70 + 1, "null": None, "deep": [[{"a": [1, True]}]]}, id="c"
                        )
                    ],
                },
            ],
            None,
            None,
        ),
        (
            {
                "messages": [
                    USER,
                    {**ANSWER, "tool_calls": [make_call({}, id=7)]},
                    {"role": "tool", "content": "", "tool_call_id": 7},
                ]
            },
            [
                USER,
                {**ANSWER, "tool_calls": [make_call({}, id="7")]},
                {"role": "tool", "content": "", "tool_call_id": "7"},
            ],
            None,
            None,
        ),
        (
            {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
            [USER, ANSWER] * 2,
            None,
            [1, 0, 1, 1],
        ),
        (
            {"messages": [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "training": True}]},
            [USER, ANSWER] * 2,
            None,
            [1, 0, 1, 1],
        ),
        (
            {"messages": [SYSTEM, USER, ANSWER], "weights": [1, 1, 0]},
            [SYSTEM, USER, ANSWER],
            None,
            [1, 1, 0],
        ),
    ],
    "ShareGPT conversations": [
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
                "weights": [1, 0],
            },
            [SYSTEM, USER, ANSWER],
            None,
            [1, 1, 0],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a", "weight": 0},
                ]
            },
            [USER, ANSWER],
            None,
            [1, 0],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {
                        "from": "function_call",
                        "value": '{"name": "f", "arguments": {"x": 1, "y": 2.5}}',
                    },
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "a"},
                ],
                "tools": json.dumps([WEATHER["function"]]),
            },
            CALLING,
            [WEATHER],
            None,
        ),
    ],
    "prompt/completion": [
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER], None, None),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER], None, None),
        (
            {"prompt": [USER, ANSWER, USER], "completion": "a", "tools": [WEATHER]},
            [USER, ANSWER] * 2,
            [WEATHER],
            [1, 0, 1, 1],
        ),
    ],
    "alpaca": [
        (
            {"instruction": "q", "input": "", "output": "a", "system": ""},
            [USER, ANSWER],
            None,
            None,
        ),
        (
            {
                "instruction": "q",
                "input": "more",
                "output": "a",
                "system": "s",
                "history": [["q", "a"], ["q", "a"]],
            },
            [SYSTEM, *[USER, ANSWER] * 2, {"role": "user", "content": "q\n\nmore"}, ANSWER],
            None,
            None,
        ),
        (
            {"messages": None, "instruction": "q", "input": None, "output": "a"},
            [USER, ANSWER],
            None,
            None,
        ),
    ],
}

REFUSED = [
    ("empty answer", {"messages": [USER, {"role": "assistant", "content": " \n"}]}),
    ("empty answer", {"messages": [USER, {"role": "assistant", "reasoning_content": "r"}]}),
    ("empty answer", {"messages": [USER, ANSWER, USER, {"role": "assistant", "content": None}]}),
    ("empty turn", {"messages": [{"role": "user", "content": ""}, ANSWER]}),
    ("unknown role", {"messages": [USER, {"role": "wizard", "content": "a"}]}),
    ("unknown role", {"messages": [USER, {"role": 5, "content": "a"}]}),
    ("unknown role", {"messages": [USER, {"content": "a"}]}),
    ("no assistant turn", {"messages": []}),
    ("no assistant turn", {"messages": [SYSTEM, USER]}),
    ("roles out of order", {"messages": [USER, USER, ANSWER]}),
    ("roles out of order", {"messages": [USER, SYSTEM, ANSWER]}),
    ("roles out of order", {"messages": [ANSWER, USER]}),
    ("roles out of order", {"messages": [USER, ANSWER, ANSWER]}),
    ("roles out of order", {"messages": [USER, {"role": "tool", "content": "3"}, ANSWER]}),
    ("content", {"messages": [USER, {"role": "assistant", "content": 42}]}),
    (
        "content",
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER]},
    ),
    ("content", {"messages": [USER, {**ANSWER, "tool_calls": [{"arguments": {}}]}]}),
    ("content", {"messages": [USER, {**ANSWER, "tool_calls": "no JSON"}]}),
    ("content", {"messages": [USER, ANSWER], "tools": [1]}),
    ("content", {"messages": [USER, ANSWER], "system": 5}),
    ("arguments", {"messages": [USER, {**ANSWER, "tool_calls": [make_call('{"a": "b"')]}]}),
    ("arguments", {"messages": [USER, {**ANSWER, "tool_calls": [make_call('["a"]')]}]}),
    ("arguments", {"messages": [USER, {**ANSWER, "tool_calls": [make_call(["a"])]}]}),
    ("arguments", {"messages": [USER, {**ANSWER, "tool_calls": [make_call('"{}"')]}]}),
    ("arguments", {"messages": [USER, {**ANSWER, "tool_calls": [make_call('{"a": NaN}')]}]}),
    ("weights", {"messages": [USER, {**ANSWER, "weight": 0.5}]}),
    ("weights", {"messages": [USER, {**ANSWER, "weight": "x"}]}),
    ("weights", {"messages": [USER, ANSWER], "weights": [1]}),
    ("weights", {"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]}),
    ("weights", {"messages": [USER, {**ANSWER, "loss_scale": 0.5}]}),
    ("weights", {"messages": [USER, {**ANSWER, "mask": 1}]}),
    ("weights", {"messages": [USER, {**ANSWER, "skipTraining": True}]}),
    ("weights", {"messages": [USER, ANSWER], "train": False}),
    ("weights", {"messages": [USER, ANSWER], "mask": "assistant"}),
    ("weights", {"messages": [USER, ANSWER], "completion_mask": [0, 1, 1]}),
    (
        "weights",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "a", "train": False}]},
            ]
        },
    ),
    ("content", {"messages": [USER, ANSWER], "chat_template_kwargs": [1]}),
    ("content", {"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": []}}),
    ("no conversation", {"messages": 5}),
    ("no conversation", {"messages": [USER, "a"]}),
    ("no conversation", {"text": "t"}),
    ("no conversation", {}),
    ("no conversation", "text"),
    ("no conversation", [USER, ANSWER]),
    ("no conversation", None),
]


@pytest.fixture(params=["orjson", "json"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with orjson and as if it were not installed."""
    if request.param == "json":
        monkeypatch.setattr(json_data, "orjson", None)


@pytest.mark.usefixtures("decoder")
def test_every_format_is_read_from_every_kind_of_file(read):
    files: dict[str, bytes | str] = {}
    for number, cases in enumerate(RECORDS.values()):
        records = [record for record, *_ in cases]
        files |= {
            f"{number}.jsonl.gz": gzip.compress(lines(records).encode()),
            f"{number}.json": json.dumps(records, indent=1),
            f"{number}.jsonl": "\ufeff" + lines(records),
        }
    outcome = read(files, format="chat")
    assert outcome.problems == []
    expected = [
        Conversation(*conversation)
        for name in sorted(files)
        for _, *conversation in [*RECORDS.values()][int(name[0])]
    ]
    assert [chat for chat, _ in outcome.chats] == expected
    assert {path: name for path, (name, _) in outcome.dataset.tally.chat.formats.items()} == {
        name: [*RECORDS][int(name[0])] for name in files
    }
    for name in ("0.jsonl", "0.json"):
        for (_, place), record in zip(
            [chat for chat in outcome.chats if chat[1].source == name],
            RECORDS["messages"],
            strict=True,
        ):
            data = files[name].encode()
            assert data[: place.offset].count(b"\n") + 1 == place.line
            assert (
                json.JSONDecoder().raw_decode(data.decode()[len(data[: place.offset].decode()) :])[
                    0
                ]
                == record[0]
            )


@pytest.mark.usefixtures("decoder")
def test_numbers_and_nulls_of_tables_are_kept(read):
    """A struct column contains the fields of all rows, and the column of weights no text."""
    records = [
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [make_call({"x": 1, "y": 2.5})],
                },
                {"role": "tool", "content": "3"},
                ANSWER,
            ],
            "weights": [1, 0, 1, 1],
            "tools": [WEATHER],
            "vector": [0.5] * 9,
        },
        {"messages": [USER, {**ANSWER, "weight": 0}], "tools": None},
    ]
    outcome = read({"a.parquet": parquet(records), "b.jsonl": "\n"}, format="chat")
    assert outcome.chats == [
        (Conversation(CALLING, [WEATHER], [1, 0, 1, 1]), Place("a.parquet", 1)),
        (Conversation([USER, ANSWER], None, [1, 0]), Place("a.parquet", 2)),
    ]
    assert outcome.kinds == ["empty"]
    table = pa.table({"messages": pa.array([[1, 2]]), "when": pa.array([3], pa.timestamp("s"))})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert read({"c.arrow": sink.getvalue()}, format="chat").problems[-1]["line"] == 1


def test_conversations_in_csv_and_yaml_are_read(read):
    """A number is text in a cell of CSV, but in YAML only between quotes."""
    outcome = read(
        {
            "a.csv": "prompt,completion,n\nhow many?,42,1\nand now?,,2\n",
            "b.tsv.bz2": bz2.compress(b"instruction\tinput\toutput\nq\t7\t1e3\n"),
            "c.yaml": "messages:\n- {role: user, content: q}\n"
            "- role: assistant\n  content: 2001-01-01\n  weight: 0\n"
            "  tool_calls: [{name: f, arguments: {x: 1, y: 2.5, z: ~}}]\n"
            "---\nmessages:\n- {role: user, content: q}\n- {role: assistant, content: 42}\n",
            "d.yml": "- instruction: q\n  output: &a a\n- instruction: q\n  output: *a\n- 5\n",
        },
        format="chat",
    )
    assert [[turn["content"] for turn in chat.messages] for chat, _ in outcome.chats] == [
        ["how many?", "42"],
        ["q\n\n7", "1e3"],
        ["q", "2001-01-01"],
        ["q", "a"],
        ["q", "a"],
    ]
    assert [place.line for _, place in outcome.chats] == [2, 2, 1, 1, 3]
    assert outcome.chats[2][0].weights == [1, 0]
    assert outcome.chats[2][0].messages[1]["tool_calls"] == [
        make_call({"x": 1, "y": 2.5, "z": None})
    ]
    assert [(p["path"], p["kind"], p["line"]) for p in outcome.problems] == [
        ("a.csv", "empty answer", 3),
        ("c.yaml", "content", 8),
        ("d.yml", "no conversation", 5),
    ]
    assert "turn 2" in outcome.problems[1]["message"]


@pytest.mark.usefixtures("decoder")
def test_refused_records_are_listed_with_their_line(read):
    good = {"messages": [USER, ANSWER]}
    records = [record for case in REFUSED for record in (case[1], good)]
    data = lines(records)
    outcome = read(
        {"a.jsonl": data, "b.txt": "plain", "c.json": '{"messages": [1, 2', "d.bin": "\0"},
        format="chat",
    )
    problems = [problem for problem in outcome.problems if problem["path"] == "a.jsonl"]
    assert [(p["kind"], p["line"]) for p in problems] == [
        (kind, 2 * number + 1) for number, (kind, _) in enumerate(REFUSED)
    ]
    assert {kind for kind, _ in REFUSED} == set(conversations.KINDS)
    for problem in problems:
        assert json.loads(data[problem["offset"] :].split("\n")[0]) == records[problem["line"] - 1]
    assert [chat for chat, _ in outcome.chats] == [Conversation([USER, ANSWER])] * len(REFUSED)
    assert [place.line for _, place in outcome.chats] == [*range(2, 2 * len(REFUSED) + 1, 2)]
    others = {problem["path"]: problem["kind"] for problem in outcome.problems}
    assert others == {
        "a.jsonl": "no conversation",
        "b.txt": "no conversation",
        "c.json": "syntax",
        "d.bin": "binary",
    }
    assert outcome.dataset.summary()["chat"]["dropped"] == {
        kind: sum(kind == other for other, _ in REFUSED) + (kind == "no conversation")
        for kind in conversations.KINDS
    }


MARKS = [
    ("loss", False), ("loss", 0), ("weight", 0), ("train", "false"), ("training", False),
    ("loss_scale", 0.0), ("trainable", False), ("train_on_turn", False), ("masked", True),
    ("mask", True),
]  # fmt: skip


@pytest.mark.usefixtures("decoder")
def test_marks_of_other_trainers_against_training_are_honoured(read):
    """In turns, in either form of them, and from tables, where every turn has the key."""
    records = [
        {"messages": [USER, {**ANSWER, key: mark}, USER, {**ANSWER, key: value}, USER, ANSWER]}
        for key, mark in MARKS
        for value in ["true" if mark == "false" else type(mark)(not mark)]
    ]
    answer = {"from": "gpt", "value": "a"}
    question = {"from": "human", "value": "q", "loss": None}
    others = [
        {
            "conversations": [
                question,
                {**answer, "loss": False},
                question,
                {**answer, "loss": True},
            ]
        },
        {"conversations": [question, {**answer, "loss": True}], "loss_mask": [1, 0]},
        {"conversations": [question, {**answer, "loss": None}], "mask": "User", "weights": [1, 1]},
        {"conversations": [question, {**answer, "weight": 0}], "weights": [1, 1]},
    ]
    outcome = read({"a.jsonl": lines(records), "b.jsonl": lines(others)}, format="chat")
    assert outcome.problems == []
    weights = [chat.weights for chat, _ in outcome.chats]
    assert weights == [[1, 0, 1, 1, 1, 1]] * len(MARKS) + [[1, 0, 1, 1], [1, 0], [1, 1], [1, 0]]
    assert not outcome.dataset.tally.chat.unused
    answer = [question, {**answer, "loss": False}, question, {**answer, "loss": True}]
    table = read({"c.parquet": parquet([{"conversations": answer}])}, format="chat")
    assert table.chats[-1][0].weights == [1, 0, 1, 1]


def test_unused_keys_are_counted_and_variables_are_kept(read):
    part = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}
    record = {
        "messages": [
            {"role": "user", "content": [part], "id": 7, "weather": "sun", "none": None},
            {**ANSWER, "reasoning": ["a", "list"], "name": "n"},
        ],
        "chat_template_kwargs": {"enable_thinking": False, "n": None},
        "documents": [{"title": "t", "text": "d"}],
        "id": 5,
        "input": "not of this format",
        "empty": "",
    }
    counts = {"record: id": 4, "record: input": 4, "turn: id": 4, "turn: weather": 4}
    counts |= {"turn: reasoning": 4, "part: cache_control": 4}
    dropped = {"messages": [USER], "other": 1}
    outcome = read({"a.jsonl": lines([record] * 4 + [dropped])}, format="chat")
    assert outcome.dataset.tally.chat.unused == counts
    assert outcome.dataset.summary()["chat"]["unused_keys"] == counts
    assert (
        "turns: id (4), reasoning (4)" in outcome.dataset.tally.chat.format_lines()["unused keys"]
    )
    variables = {"enable_thinking": False, "documents": record["documents"]}
    assert [chat.template_kwargs for chat, _ in outcome.chats] == [variables] * 4


def test_unused_columns_of_tables_are_counted_without_reading_them(read):
    variables = {"enable_thinking": False}
    record = {"messages": [USER, ANSWER], "chat_template_kwargs": variables, "id": 5, "empty": ""}
    table = read({"b.parquet": parquet([{**record, "input": "x"}] * 4)}, format="chat")
    counts = {"record: id": 4, "record: empty": 4, "record: input": 4}
    assert table.dataset.tally.chat.unused == counts
    assert [chat.template_kwargs for chat, _ in table.chats] == [variables] * 4


def test_line_numbers_continue_across_spans(read, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 400)
    records = [
        {"messages": [USER, {**ANSWER, "content": str(number % 50)}]} for number in range(100)
    ]
    records[60] = {"messages": [USER]}
    outcome = read({"a.jsonl": lines(records), "b.jsonl": lines(records[:2])}, format="chat")
    expected = [Place("a.jsonl", line) for line in range(1, 101) if line != 61]
    assert [place._replace(offset=None) for _, place in outcome.chats] == [
        *expected,
        Place("b.jsonl", 1),
        Place("b.jsonl", 2),
    ]
    assert [(p["line"], p["kind"]) for p in outcome.problems] == [(61, "no assistant turn")]
    assert not outcome.dataset.tally.chat.mixed


def test_dropped_rows_do_not_change_other_line_numbers(read, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 400)
    records = [
        {"messages": [USER, {**ANSWER, "content": f"answer {number % 30}"}]}
        for number in range(100)
    ]
    other = {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "answer 3"}],
        "source": "elsewhere",
    }
    outcome = read(
        {"a.jsonl": lines(records), "b.jsonl": lines([other])},
        format="chat",
        dedup="exact",
        min_chars=10,
    )
    assert [place.line for _, place in outcome.chats] == [*range(11, 31)]
    assert outcome.dataset.duplicates == 40
    assert outcome.dataset.tally.short == 41
    text_bytes = sum(len(turn["content"]) for chat, _ in outcome.chats for turn in chat.messages)
    assert outcome.dataset.summary()["text_bytes"] == text_bytes


def test_mixed_formats_are_found_in_all_spans(read, monkeypatch):
    alpaca = {"instruction": "q", "output": "a"}
    chat = {"messages": [USER, ANSWER]}
    for size in (1 << 30, 300):
        monkeypatch.setattr(work_units, "UNIT_BYTES", size)
        outcome = read(
            {
                "a.jsonl": lines([chat] * 50),
                "b.jsonl": lines([{}, *[chat] * 49, alpaca]),
                "c.json": json.dumps([alpaca, chat]),
            },
            format="chat",
        )
        assert outcome.dataset.tally.chat.mixed == {
            "b.jsonl": (("messages", 2), ("alpaca", 51)),
            "c.json": (("alpaca", 1), ("messages", 1)),
        }
        error = outcome.dataset.tally.chat.find_mixture()
        assert "b.jsonl: messages in line 2, alpaca in line 51" in error.found
        (outcome.dataset._directory / "errors.jsonl").unlink()


@pytest.mark.usefixtures("decoder")
def test_invalid_unicode_is_replaced_and_counted(read):
    odd = json.dumps(
        {
            "messages": [
                USER,
                {
                    **ANSWER,
                    "content": "\ud800x\udc00",
                    "name": "\ud800",
                    "tool_calls": [make_call({"\ud800": ["\udfff"]})],
                },
            ]
        }
    )
    outcome = read(
        {
            "a.jsonl": odd + "\n",
            "b.jsonl": b'{"prompt": "q\xff", "completion": "a"}\n',
            "c.json": lines([{"messages": [USER, ANSWER]}]).encode("utf-16"),
        },
        format="chat",
        dedup="exact",
    )
    assert [chat.messages for chat, _ in outcome.chats] == [
        [
            USER,
            {
                "role": "assistant",
                "content": "\ufffdx\ufffd",
                "name": "\ufffd",
                "tool_calls": [make_call({"\ufffd": ["\ufffd"]})],
            },
        ],
        [{"role": "user", "content": "q\ufffd"}, ANSWER],
        [USER, ANSWER],
    ]
    assert outcome.dataset.tally.replaced == 6 and outcome.kinds == ["encoding"] * 2
    assert outcome.chats[2][1] == Place("c.json", 1)


def test_deep_cut_and_large_records_are_listed(read, monkeypatch):
    monkeypatch.setattr("lib.corpus.raw_file.LARGE_BYTES", 5_000_000)
    deep = {"messages": [USER, {**ANSWER, "tool_calls": [make_call({"x": 1})]}]}
    texts = [json.dumps(deep).replace("1", "[" * depth + "]" * depth) for depth in (5, 300, 90_000)]
    huge = json.dumps({"messages": [USER, {**ANSWER, "content": "x" * 6_000_000}]})
    data = "\n".join([*texts, huge, lines([{"messages": [USER, ANSWER]}])])
    packed = gzip.compress((lines([{"prompt": "q", "completion": "a"}]) * 3).encode())
    outcome = read({"a.jsonl": data, "b.jsonl.gz": packed[:-9]}, format="chat")
    assert [(p["path"], p["line"], p["kind"]) for p in outcome.problems] == [
        ("a.jsonl", 2, "content"),
        ("a.jsonl", 3, "nesting"),
        ("a.jsonl", 4, "too large"),
        ("b.jsonl.gz", None, "cut"),
    ]
    assert [(place.source, place.line) for _, place in outcome.chats][:2] == [
        ("a.jsonl", 1),
        ("a.jsonl", 5),
    ]


def test_the_last_of_equal_keys_counts(read):
    outcome = read(
        {"a.jsonl": '{"prompt": "x", "completion": "a", "prompt": "q"}\n'}, format="chat"
    )
    assert outcome.chats[0][0] == Conversation([USER, ANSWER])


@pytest.mark.usefixtures("decoder")
def test_any_record_becomes_a_row_or_a_line_of_errors(read):
    """Values of any type in any place raise nothing, and no row is unfit for templates."""
    draw = random.Random(17)
    seeds = [record for cases in RECORDS.values() for record, *_ in cases]
    records = []
    for _ in range(3000):
        record = draw.choice(seeds)
        for _ in range(draw.randint(1, 2)):
            place = draw.choice([*places(record)])
            record = changed(record, place, draw.choice(VALUES))
        records.append(record)
    outcome = read(
        {f"{number:04}.jsonl": json.dumps(record) + "\n" for number, record in enumerate(records)},
        format="chat",
        dedup="exact",
        validation_percent=1,
    )
    rows = outcome.dataset.tally.documents
    refused = [p for p in outcome.problems if p["kind"] not in ("duplicate", "encoding")]
    assert rows + len(refused) == len(records) and 300 < rows < 2700
    assert {p["kind"] for p in refused} == set(conversations.KINDS)
    for chat, place in outcome.chats:
        roles = [turn["role"] for turn in chat.messages]
        assert set(roles) <= set(conversations.ROLES) and "assistant" in roles
        assert place.line == 1 and place.offset == 0
        assert all(
            isinstance(value, str)
            for turn in chat.messages
            for name, value in turn.items()
            if name != "tool_calls"
        )
        assert chat.weights is None or len(chat.weights) == len(roles)
        json.dumps([chat.messages, chat.tools]).encode()
