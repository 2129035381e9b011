"""Chat datasets on disk: opened, read, and those made elsewhere refused with what makes them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.tokens import columns
from lib.tokens.dataset import open_dataset
from tests.tokens import chats


def test_a_chat_dataset_is_opened_and_read(tmp_path: Path) -> None:
    talks = [chats.talk(seed) for seed in range(57)]
    found = open_dataset(chats.save(tmp_path / "d", train=talks[:50], validation=talks[50:]))
    assert found.format == columns.CHAT and list(found.splits) == ["train", "validation"]
    rows = [row for batch in found.conversations("train") for row in batch]
    assert [chat for chat, _ in rows] == talks[:50] and rows[12][1] == ("train.jsonl", 13, 1200)
    rest = [chat for batch in found.conversations("train", 33) for chat, _ in batch]
    assert rest == talks[33:50]
    said = [message["content"].encode() for chat in talks[:50] for message in chat.messages]
    assert [text for batch in found.texts() for text in batch] == said
    assert found.extent() == (50, sum(map(len, said)))
    sample = found.sample(texts=5)
    assert 5 <= len(sample) <= 6 and all(text.split(b"\n")[-1] in said for text in sample)
    assert 10 <= len(list(found.spread(10))) <= 11


@pytest.mark.parametrize("names", [("messages",), ("id", "conversations"), ("prompt", "completion"),
                                   ("instruction", "input", "output")])
def test_conversations_made_elsewhere_are_told_with_stage_02(
        tmp_path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "-e", "x", "-d", "org/talks=2", "-d", "b"])
    place = Path("hf_datasets/org--talks")
    made = datasets.Dataset.from_dict({name: ["a", "b"] for name in names})
    datasets.DatasetDict({"train": made}).save_to_disk(str(place))
    with pytest.raises(UsageError, match="was not made by stage 02") as caught:
        open_dataset(place)
    build, train = map(shlex.split, caught.value.run.splitlines())
    assert build[-6:] == ["--data-folder", f"{place}/train", "--save-dir",
                          "hf_datasets/org--talks-chat", "--format", "chat"]
    assert train[-4:] == ["-d", "hf_datasets/org--talks-chat=2", "-d", "b"]
    with pytest.raises(UsageError, match="was not made by stage 02"):
        open_dataset(next((place / "train").glob("*.arrow")))


def test_text_and_conversations_do_not_share_a_dataset(tmp_path: Path) -> None:
    import datasets
    path = chats.save(tmp_path / "d", train=[chats.talk(1)], validation=[chats.talk(2)])
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    (path / "validation").rename(tmp_path / "other")
    (tmp_path / "text").rename(path / "validation")
    with pytest.raises(UsageError, match="both text and conversations"):
        open_dataset(path)
