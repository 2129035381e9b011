# covers: lib/tokens/chat/counts.py, lib/tokens/chat/policy.py, lib/tokens/chat/write.py
# covers: lib/tokens/chat/encode.py
"""The token store of a chat dataset: labels, refused datasets, kills and damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.conversation import CALLS, TEXTS
from lib.core.errors import ArtifactError, UsageError
from lib.tokens import build, dataset, split_writer, store
from lib.tokens.chat import counts, write
from lib.tokens.chat.encode import ChatEncoder
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.chat.write import ChatTokenization
from lib.tokens.dataset import open_dataset
from lib.tokens.encode import Encoder
from lib.tokens.text_writer import TextTokenization
from tests.tokens.chat import chats

FILES = [
    f"{split}.{kind}.bin"
    for split in ("train", "validation")
    for kind in ("tokens", "ends", "labels")
] + [counts.ERRORS, CHAT_TEMPLATE]


class PoolHere:
    """Stands for a pool of worker processes; answers in this process."""

    def __init__(self, count: int, name: str, prepare: object, *arguments: object) -> None:
        self._answer = prepare(*arguments)

    def __enter__(self) -> PoolHere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, tasks: Iterator[object]) -> Iterator[object]:
        return map(self._answer, tasks)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no worker processes."""
    monkeypatch.setattr(write, "Pool", PoolHere)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    talks = [chats.make_conversation(seed) for seed in range(90)]
    talks[20] = chats.make_conversation(20, turns=40)  # too long
    talks[21] = talks[21]._replace(weights=[0.0] * len(talks[21].messages))
    return chats.save_dataset(
        tmp_path_factory.mktemp("c") / "talks", rows=7, train=talks[:80], validation=talks[80:]
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.save_tokenizer(tmp_path_factory.mktemp("t") / "tokenizer")


def policy(
    template: str = chats.CHATML, train_on: str = "assistant", longest: int = 700
) -> ChatPolicy:
    return ChatPolicy(template, train_on, "drop", longest)


def prepare_chats(
    corpus: Path,
    tokenizer: Path,
    cache: Path,
    workers: int = 1,
    chat_policy: ChatPolicy | None = None,
) -> Path:
    tokenization = ChatTokenization(
        open_dataset(corpus), tokenizer, workers, False, chat_policy or policy()
    )
    return build.prepare_store(tokenization, cache, 100_000)


def test_a_store_contains_the_samples_and_a_bit_for_each_label(
    corpus: Path, tokenizer: Path, tmp_path: Path, here: None
) -> None:
    path = prepare_chats(corpus, tokenizer, tmp_path)
    opened = store.open_store(path)
    facts = counts.read_facts(opened)
    encoder = ChatEncoder(policy(), Encoder(tokenizer, 1))
    for name, split in opened.splits.items():
        placed = chats.read_conversations(open_dataset(corpus), name)
        encoded = encoder.encode([chat for chat, _ in placed])
        assert np.array_equal(split.tokens, encoded.tokens) and len(split.labels) == len(
            encoded.tokens
        )
        assert np.array_equal(split.ends, np.cumsum(encoded.lengths))
        for part in (slice(0, None), slice(3, 50), slice(8, 16), slice(15, 17), slice(5, 5)):
            assert np.array_equal(split.labels[part], encoded.trained[part])
        assert split.labels.total == encoded.trained.sum() == facts.counts[name].trained
        ends = np.asarray(split.ends)
        labels = split.labels.label_counts(ends - encoded.lengths, ends)
        assert labels.tolist() == [
            encoded.trained[end - length : end].sum()
            for end, length in zip(ends, encoded.lengths, strict=True)
        ]
    assert facts.template == chats.CHATML and facts.stops == [3]
    assert facts.names == {3: "<|im_end|>"}
    train = facts.counts["train"]
    assert (train.conversations, train.samples) == (80, 78)
    assert train.dropped == {"too long": 1, "nothing trained": 1} and train.ended_share == 1
    errors = [json.loads(line) for line in (path / counts.ERRORS).read_text().splitlines()]
    assert [
        (one["path"], one["line"], one["offset"], one["kind"], one["action"]) for one in errors
    ] == [
        ("train.jsonl", 21, 2000, "too long", "dropped"),
        ("train.jsonl", 22, 2100, "nothing trained", "dropped"),
    ]
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, "manifest.json"])


def test_each_option_that_changes_samples_gives_another_store(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    shared = (open_dataset(corpus), tokenizer, 1, False)
    ways = [
        policy(),
        policy(chats.CHATML.replace("|", "/")),
        policy(train_on="last"),
        policy(longest=600),
        policy()._replace(too_long="split"),
        policy(),
    ]
    kinds = [TextTokenization(*shared), *(ChatTokenization(*shared, way) for way in ways)]
    assert len({kind.find_store(tmp_path)[0] for kind in kinds}) == 6


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def test_the_same_bytes_with_any_number_of_processes_and_after_any_kill(
    corpus: Path, tokenizer: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_writer, "_SAVE_PROGRESS_S", 0)
    monkeypatch.setattr(dataset, "_CHAT_ROWS", 5)
    expected = prepare_chats(corpus, tokenizer, tmp_path / "whole", 2)
    assert same(expected, prepare_chats(corpus, tokenizer, tmp_path / "one"))
    cache = tmp_path / "killed"
    append = split_writer.SplitWriter.append
    batches_left = iter(())

    def killed(writer: split_writer.SplitWriter, *arguments: np.ndarray) -> None:
        append(writer, *arguments)
        if next(batches_left, None) is None:
            raise KeyboardInterrupt

    for batches in (0, 1, 4, 7):
        batches_left = iter(range(batches))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(split_writer.SplitWriter, "append", killed)
            prepare_chats(corpus, tokenizer, cache)
    path = prepare_chats(corpus, tokenizer, cache, 3)
    assert same(expected, path)
    assert (path / "manifest.json").read_text().count("conversations") == 2
    assert (
        json.loads((path / "manifest.json").read_text())["summary"]
        == json.loads((expected / "manifest.json").read_text())["summary"]
    )


@pytest.mark.parametrize(
    ("talks", "chat_policy", "words"),
    [
        ([], policy(), "no conversation"),
        ([chats.make_conversation(0, 30)], policy(longest=30), "no conversation in"),
        (
            [chats.make_conversation(n) for n in range(9)],
            policy("{{ messages|length }}" + chats.CHATML),
            "template gives no sample",
        ),
        (
            [chats.make_conversation(n) for n in range(9)],
            policy("{% if messages[1] %}{{ raise_exception('no') }}{% endif %}" + chats.CHATML),
            "template gives no sample",
        ),
        (
            [chats.make_conversation(n) for n in range(9)],
            policy("{% generation %}" + chats.CHATML.partition("{% if")[0] + "{% endgeneration %}"),
            "from its beginning|no sample",
        ),
        (
            [
                chats.make_conversation(1)._replace(
                    messages=[
                        {"role": "user", "content": "word " * 900},
                        {"role": "assistant", "content": "a"},
                    ]
                )
            ],
            policy(longest=9999),
            r"only 0\.\d+ % of the tokens",
        ),
    ],
    ids=["nothing", "too long", "no mask", "raises", "all", "too little"],
)
def test_untrainable_datasets_are_refused_without_leftovers(
    talks: list, chat_policy: ChatPolicy, words: str, tokenizer: Path, tmp_path: Path, here: None
) -> None:
    corpus = chats.save_dataset(tmp_path / "d", train=talks)
    with pytest.raises(UsageError, match=words) as caught:
        prepare_chats(corpus, tokenizer, tmp_path / "c", chat_policy=chat_policy)
    assert not list((tmp_path / "c/tokens").iterdir())
    if talks:
        assert caught.value.found and caught.value.hint
    if "would be" in caught.value.problem:
        assert "⟦" in caught.value.found


ODD_ROWS = {
    "another number of weights": ("weights", {"weights": [1.0]}),
    "a weight of a half": ("weights", {"weights": [1.0, 0.5]}),
    "a weight that is no number": ("weights", {"weights": [1.0, float("nan")]}),
    "a weight that is missing": ("weights", {"weights": [1.0, None]}),
    "tools that are no JSON": ("content", {"tools": "add"}),
    "tools that are no list": ("content", {"tools": "{}"}),
    "tools nested deeply": ("content", {"tools": "[" * 50_000 + "]" * 50_000}),
    "tools nested less deeply": ("content", {"tools": '[{"a": ' + "[" * 300 + "]" * 300 + "}]"}),
    "calls that are no JSON": ("content", {"calls": "["}),
    "calls of no objects": ("content", {"calls": "[1]"}),
    "an empty answer with an empty list of calls": ("empty answer", {"answer": "", "calls": "[]"}),
    "a call of a number": ("content", {"calls": '[{"function": {"name": 1, "arguments": {}}}]'}),
    "a call of nothing": ("content", {"calls": '[{"function": null}]'}),
    "tools with NaN": ("content", {"tools": '[{"name": "f", "least": NaN}]'}),
    "tools with a number that is too large": ("content", {"tools": '[{"name": "f", "a": 1e999}]'}),
    "tools with half a character": ("content", {"tools": '[{"name": "\\ud800"}]'}),
    "calls nested deeply": ("content", {"calls": "[" * 50_000 + "]" * 50_000}),
    "no role": ("unknown role", {"role": None}),
    "a role of another system": ("unknown role", {"role": "gpt"}),
    "a message that is missing": ("unknown role", {"messages": [None]}),
    "an empty answer": ("empty answer", {"answer": " "}),
    "no content": ("empty answer", {"answer": None}),
    "two questions": ("roles out of order", {"role": "user"}),
    "no turn": ("no assistant turn", {"messages": []}),
    "no messages": ("no assistant turn", {"messages": None}),
}


def saved_by_datasets(path: Path, odd: dict[str, object] | None, count: int = 5) -> Path:
    """Save a chat dataset as `datasets` does after a map, with one odd row."""
    import datasets

    rows = []
    for number in range(count):
        oddity = odd if odd is not None and number == 2 else {}
        messages = [
            {"role": "user", "content": "ka"},
            {
                "role": oddity.get("role", "assistant") if oddity else "assistant",
                "content": oddity.get("answer", "lo"),
                "reasoning_content": None,
                "name": None,
                "tool_call_id": None,
                "tool_calls": oddity.get("calls"),
            },
        ]
        rows.append(
            {
                "messages": oddity.get("messages", messages),
                "tools": oddity.get("tools"),
                "weights": oddity.get("weights", [1.0, 1.0]),
                "source": "a",
                "line": number,
                "offset": None,
            }
        )
    text = datasets.Value("string")
    message = {name: text for name in (*TEXTS, CALLS)}
    features = datasets.Features(
        {
            "messages": [message],
            "tools": text,
            "weights": [datasets.Value("float64")],
            "source": text,
            "line": datasets.Value("int64"),
            "offset": datasets.Value("int64"),
        }
    )
    chat_dataset = datasets.Dataset.from_list(rows, features=features)
    datasets.DatasetDict({"train": chat_dataset}).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ODD_ROWS)
def test_rows_that_stage_02_would_drop_are_dropped_and_listed(
    name: str, tokenizer: Path, tmp_path: Path, here: None
) -> None:
    kind, odd = ODD_ROWS[name]
    path = prepare_chats(saved_by_datasets(tmp_path / "d", odd), tokenizer, tmp_path)
    train = counts.read_facts(store.open_store(path)).counts["train"]
    assert (train.conversations, train.samples, train.dropped) == (5, 4, {kind: 1})
    [error] = [json.loads(line) for line in (path / counts.ERRORS).read_text().splitlines()]
    assert (error["kind"], error["line"], error["action"]) == (kind, 2, "dropped")


def test_a_dataset_without_a_valid_row_is_answered_with_stage_02(
    tokenizer: Path, tmp_path: Path, here: None
) -> None:
    import datasets

    source = saved_by_datasets(tmp_path / "s", None)
    both = datasets.load_from_disk(str(source)).map(
        lambda row: {
            "messages": [
                message | {"role": {"user": "human"}.get(message["role"], "gpt")}
                for message in row["messages"]
            ]
        }
    )
    both.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match="no conversation") as caught:
        prepare_chats(tmp_path / "d", tokenizer, tmp_path)
    assert "'human' as its role" in caught.value.found
    assert "--train-on" not in caught.value.hint
    assert f"--data-folder {tmp_path}/d/train --save-dir" in caught.value.run


def test_damage_is_reported(corpus: Path, tokenizer: Path, tmp_path: Path, here: None) -> None:
    path = prepare_chats(corpus, tokenizer, tmp_path)
    copy = Path(shutil.copytree(path, tmp_path / "kept"))

    def restored() -> None:
        shutil.rmtree(path)
        shutil.copytree(copy, path)

    for name in ("train.labels.bin", "validation.labels.bin", CHAT_TEMPLATE, counts.ERRORS):
        data = bytearray((path / name).read_bytes())
        (path / name).write_bytes(data[:-1])
        with pytest.raises(ArtifactError, match=r"token store .*damaged"):
            store.open_store(path)
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)
        with pytest.raises(ArtifactError, match=r"token store .*damaged"):
            prepare_chats(corpus, tokenizer, tmp_path)
        restored()
    for part, value in (
        ("label_mask", "*.bits"),
        ("chat", None),
        ("chat", {"splits": {}}),
        ("splits", {"train": {"tokens": 1}}),
    ):
        content = json.loads((path / "manifest.json").read_text())
        content["summary"][part] = value
        (path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(ArtifactError):
            counts.read_facts(store.open_store(path))
        restored()


def test_a_torn_progress_note_restarts_the_build(
    corpus: Path, tokenizer: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare_chats(corpus, tokenizer, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(write.ChatWriter, "close", _raise_interrupt)
        prepare_chats(corpus, tokenizer, tmp_path / "c")
    [note] = (tmp_path / "c/tokens").glob("*/content/train.progress.json")
    content = json.loads(note.read_text())
    for damaged in ({"bits": "x"}, {"counts": {"conversations": 1}}, {"errors": -5}):
        note.write_text(json.dumps(content | {"chat": content["chat"] | damaged}))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(write.ChatWriter, "close", _raise_interrupt)
            prepare_chats(corpus, tokenizer, tmp_path / "c")
        assert json.loads(note.read_text())["chat"] == content["chat"]
    assert same(expected, prepare_chats(corpus, tokenizer, tmp_path / "c"))


def _raise_interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt
