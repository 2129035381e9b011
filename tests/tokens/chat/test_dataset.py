# covers: lib/tokens/chat/conversations.py
"""Open and read chat datasets; foreign ones are refused with the commands that convert them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from lib.core.conversation import Conversation, Place
from lib.core.errors import ArtifactError, UsageError
from lib.tokens import columns
from lib.tokens.chat import conversations
from lib.tokens.dataset import open_dataset
from tests.tokens.chat import chats


def test_a_chat_dataset_is_opened_and_read(tmp_path: Path) -> None:
    talks = [chats.make_conversation(seed) for seed in range(57)]
    dataset = open_dataset(
        chats.save_dataset(tmp_path / "d", train=talks[:50], validation=talks[50:])
    )
    assert dataset.format == columns.CHAT and list(dataset.splits) == ["train", "validation"]
    rows = chats.read_conversations(dataset, "train")
    assert [chat for chat, _ in rows] == talks[:50] and rows[12][1] == ("train.jsonl", 13, 1200)
    rest = [chat for chat, _ in chats.read_conversations(dataset, "train", 33)]
    assert rest == talks[33:50]
    contents = [message["content"].encode() for chat in talks[:50] for message in chat.messages]
    assert [text for batch in dataset.texts() for text in batch] == contents
    assert dataset.extent() == (50, sum(map(len, contents)))
    sample = dataset.sample(texts=5)
    assert 5 <= len(sample) <= 6 and all(text.split(b"\n")[-1] in contents for text in sample)
    assert 10 <= len(list(dataset.spread(10))) <= 11


@pytest.mark.parametrize(
    "names",
    [
        ("messages",),
        ("id", "conversations"),
        ("prompt", "completion"),
        ("instruction", "input", "output"),
    ],
)
def test_foreign_conversations_are_answered_with_stage_02(
    tmp_path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "-e", "x", "-d", "org/talks=2", "-d", "b"])
    place = Path("hf_datasets/org--talks")
    dataset = datasets.Dataset.from_dict({name: ["a", "b"] for name in names})
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(place))
    with pytest.raises(UsageError, match="stage 02") as caught:
        open_dataset(place)
    build, train = map(shlex.split, caught.value.run.splitlines())
    assert build[-6:] == [
        "--data-folder",
        f"{place}/train",
        "--save-dir",
        "hf_datasets/org--talks-chat",
        "--format",
        "chat",
    ]
    assert train[-4:] == ["-d", "hf_datasets/org--talks-chat=2", "-d", "b"]
    with pytest.raises(UsageError, match="stage 02"):
        open_dataset(next((place / "train").glob("*.arrow")))


COLUMNS = {
    "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]],
    "tools": [None],
    "weights": [[1, 1]],
    "source": ["a"],
    "line": [1],
    "offset": [None],
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"messages": ["a"]}, "`messages` is string"),
        ({"messages": [["a", "b"]]}, "`messages` is list<"),
        ({"messages": [[{"role": "user"}]]}, "all fields strings"),
        ({"messages": [[{"role": 1, "content": "a"}]]}, "all fields strings"),
        ({"messages": [[{"role": "user", "content": [{"type": "text"}]}]]}, "all fields strings"),
        (
            {"messages": [[{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}]]},
            "all fields strings",
        ),
        ({"messages": [None]}, "empty in all rows"),
        ({"tools": [["f"]]}, "`tools` is list<"),
        ({"weights": ["1"]}, "`weights` is string"),
        ({"line": ["1"]}, "`line` is string"),
        ({"source": [3]}, "`source` is int64"),
    ],
)
def test_other_columns_than_those_of_a_chat_dataset_are_refused(
    tmp_path: Path, changed: dict[str, list], says: str
) -> None:
    import datasets

    datasets.Dataset.from_dict(COLUMNS | changed).save_to_disk(str(tmp_path / "d"))
    for path in (tmp_path / "d", next((tmp_path / "d").glob("*.arrow"))):
        with pytest.raises(UsageError, match="not a chat dataset") as caught:
            open_dataset(path)
        assert says in caught.value.found and f"--data-folder {tmp_path}/d " in caught.value.run


def test_columns_changed_by_datasets_are_read(tmp_path: Path) -> None:
    """Strings instead of large strings, untyped nulls, and messages of only role and content."""
    import datasets

    datasets.Dataset.from_dict(COLUMNS).save_to_disk(str(tmp_path / "d"))
    dataset = open_dataset(tmp_path / "d")
    [(chat, place)] = chats.read_conversations(dataset, "train")
    assert chat == Conversation(COLUMNS["messages"][0], None, [1, 1]) and place == ("a", 1, None)
    assert dataset.extent() == (1, 2) and list(dataset.texts()) == [[b"a", b"b"]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train/dataset_info.json", {"features": ["text"]}),
        ("train/dataset_info.json", []),
        ("train/state.json", {"_data_files": [5]}),
        ("train/state.json", {"_data_files": 5}),
        ("train/state.json", {"_data_files": [{"filename": 5}]}),
        ("train/state.json", "x"),
        ("dataset_dict.json", {"splits": 5}),
        ("dataset_dict.json", {"splits": [["train"]]}),
    ],
)
def test_malformed_descriptions_are_damage(tmp_path: Path, name: str, content: object) -> None:
    path = chats.save_dataset(tmp_path / "d", train=[chats.make_conversation(1)])
    (path / name).write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="is damaged"):
        open_dataset(path)


def test_text_and_conversations_do_not_share_a_dataset(tmp_path: Path) -> None:
    import datasets

    path = chats.save_dataset(
        tmp_path / "d", train=[chats.make_conversation(1)], validation=[chats.make_conversation(2)]
    )
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    (path / "validation").rename(tmp_path / "other")
    (tmp_path / "text").rename(path / "validation")
    with pytest.raises(UsageError, match="both text and conversations"):
        open_dataset(path)


def test_strings_that_are_not_utf8_are_damage(tmp_path: Path) -> None:
    batch = chats.make_batch([(chats.make_conversation(1), Place("a", 1, 0))])
    broken = pa.array([b"[\xff]"], pa.large_binary()).view(pa.large_string())
    with pytest.raises(ArtifactError, match="is damaged"):
        list(conversations.read_rows(batch.set_column(1, "tools", broken)))
    path = chats.save_dataset(tmp_path / "d", train=[chats.make_conversation(1)])
    shard = next((path / "train").glob("*.arrow"))
    text = chats.make_conversation(1).messages[0]["content"].encode()
    shard.write_bytes(shard.read_bytes().replace(text, b"\xff" * len(text)))
    with pytest.raises(ArtifactError, match="is damaged"):
        chats.read_conversations(open_dataset(path), "train")
    with pytest.raises(ArtifactError, match="is damaged"):
        list(open_dataset(path).texts())
