# covers: lib/tokens/store.py, lib/tokens/dataset.py, lib/tokens/build.py
# covers: lib/tokens/split_writer.py, lib/tokens/text_writer.py, lib/tokens/samples.py
"""The token store: its content, the process that builds it, and its state after a kill."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from lib.core import reading, records
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.tokens import build, dataset, split_writer, store
from lib.tokens.dataset import Dataset, open_dataset
from lib.tokens.samples import Windows
from lib.tokens.text_writer import TextTokenization, TextWriter
from tests import forks
from tests.conftest import ROOT
from tests.forks import Launch

from .conftest import save_tokenizer

FILES = [f"{split}.{kind}.bin" for split in ("train", "validation") for kind in ("tokens", "ends")]


def tokenization(dataset: Path, tokenizer: Path) -> TextTokenization:
    return TextTokenization(open_dataset(dataset), tokenizer, 1, False)


def prepare_tokens(dataset: Path, tokenizer: Path, cache: Path, model_vocab: int = 100_000) -> Path:
    return build.prepare_store(tokenization(dataset, tokenizer), cache, model_vocab)


def expected(split: Path, tokenizer: Path) -> list[list[int]]:
    """Return the ids that the tokenizer itself gives for each document, and EOS."""
    import datasets
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(tokenizer))
    return [
        [*hf(text)["input_ids"], hf.eos_token_id]
        for text in datasets.load_from_disk(str(split))["text"]
    ]


@pytest.mark.parametrize(
    ("extra_ids", "dtype"), [(0, "uint16"), (65_536 - 258, "uint16"), (65_537 - 258, "uint32")]
)
def test_a_store_contains_the_tokenizer_s_ids_document_by_document(
    tmp_path: Path, of_stage_02: Path, extra_ids: int, dtype: str
) -> None:
    tokenizer = save_tokenizer(tmp_path / "t", bos=True, extra_ids=extra_ids)
    opened = store.open_store(prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache"))
    assert list(opened.splits) == ["train", "validation"]
    assert opened.vocab_size == 258 + extra_ids
    for name, split in opened.splits.items():
        ids = expected(of_stage_02 / name, tokenizer)
        assert split.tokens.dtype == dtype and split.ends.dtype == "int64"
        assert [part.tolist() for part in np.split(split.tokens, split.ends[:-1])] == ids
        assert opened.summary["splits"][name] == {
            "tokens": sum(map(len, ids)),
            "documents": len(ids),
        }
        assert split.ends[-1] == len(split.tokens)


def test_an_empty_split_is_an_empty_store(tmp_path: Path, tokenizer: Path) -> None:
    import datasets

    rows = {
        name: datasets.Dataset.from_dict(
            {"text": text}, features=datasets.Features({"text": datasets.Value("string")})
        )
        for name, text in (("train", ["a"]), ("validation", []))
    }
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "d"))
    opened = store.open_store(prepare_tokens(tmp_path / "d", tokenizer, tmp_path / ".cache"))
    assert len(opened.splits["validation"].tokens) == len(opened.splits["validation"].ends) == 0


def test_a_store_is_built_once_per_content(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    cache = tmp_path / ".cache"
    path = prepare_tokens(of_stage_02, tokenizer, cache)
    time_ns = (path / "manifest.json").stat().st_mtime_ns
    assert prepare_tokens(of_stage_02, tokenizer, cache) == path
    moved = of_stage_02.rename(tmp_path / "corpus")
    assert prepare_tokens(moved, tokenizer.rename(tmp_path / "other"), cache) == path
    assert (path / "manifest.json").stat().st_mtime_ns == time_ns
    other = prepare_tokens(moved, save_tokenizer(tmp_path / "t2", bos=False), cache)
    assert other != path and len(list(other.parent.iterdir())) == 2


def test_a_store_is_relocatable(tmp_path: Path, of_stage_02: Path, tokenizer: Path) -> None:
    first = store.open_store(prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache"))
    shutil.move(tmp_path / ".cache", tmp_path / "elsewhere")
    path = prepare_tokens(of_stage_02, tokenizer, tmp_path / "elsewhere")
    second = store.open_store(path)
    assert path.is_relative_to(tmp_path / "elsewhere")
    assert second.fingerprint == first.fingerprint
    assert str(tmp_path) not in (path / "manifest.json").read_text()


def test_a_tokenizer_larger_than_the_model_is_refused_before_any_work(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    with pytest.raises(UsageError, match="vocabulary") as caught:
        prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache", model_vocab=257)
    assert "at most 257" in caught.value.expected and "258" in caught.value.found
    assert not list((tmp_path / ".cache").rglob("*.bin"))
    prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache", model_vocab=258)


def test_damage_in_the_dataset_is_found_before_it_is_trained_on(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    shard = next(iter((of_stage_02 / "train").glob("*.arrow")))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged"):
        prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache")


@pytest.mark.parametrize("damage", ["short", "missing", "unfinished"])
def test_a_damaged_store_is_reported_with_a_remedy(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path, damage: str
) -> None:
    path = prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache")
    tokens = path / "train.tokens.bin"
    if damage == "short":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif damage == "missing":
        tokens.unlink()
    else:
        (path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"is damaged|is not finished") as caught:
        store.open_store(path)
    assert damage == "unfinished" or f"rm -r {path}" in caught.value.run


def start_building(*arguments: object, **environment: str) -> tuple[Launch, IO[str]]:
    """Start building.py in a child process; return it and its output."""
    reader, writer = os.pipe()
    launch = Launch(
        forks.get_server("stages").start(
            "",
            arguments,
            ROOT,
            {**os.environ, **environment},
            writer,
            2,
            call="tests.tokens.building:prepare_store",
        )
    )
    os.close(writer)
    return launch, os.fdopen(reader)


def wait_for(printed: IO[str], text: str) -> None:
    for line in printed:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed")


def test_a_second_launch_and_other_ranks_wait_for_the_builder(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    cache = tmp_path / ".cache"
    builder = start_building(of_stage_02, tokenizer, cache, 0.1)
    wait_for(builder[1], "writing")
    others = [
        start_building(of_stage_02, tokenizer, cache, 0),
        start_building(of_stage_02, tokenizer, cache, 0, LOCAL_RANK="1", RANK="1"),
    ]
    outputs = [printed.read() for _, printed in (builder, *others)]
    assert [launch.wait() for launch, _ in (builder, *others)] == [[0]] * 3
    [path] = (cache / "tokens").iterdir()
    assert [output.splitlines()[-1] for output in outputs] == [str(path)] * 3
    assert f"waiting for {path}" in outputs[1]
    store.open_store(path)


@pytest.mark.parametrize(
    "writes",
    [
        1,
        pytest.param(6, marks=pytest.mark.slow),
        *(pytest.param(writes, marks=pytest.mark.long) for writes in (2, 3, 9)),
    ],
)
def test_a_killed_build_continues_to_the_same_bytes(
    tmp_path: Path,
    of_stage_02: Path,
    tokenizer: Path,
    writes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / ".cache"
    killed, printed = start_building(of_stage_02, tokenizer, cache, 0.4)
    for _ in range(writes):
        wait_for(printed, "writing")
    killed.kill()
    [partial] = (cache / "tokens").iterdir()
    assert ".partial-" in partial.name
    with pytest.raises(ArtifactError):
        store.open_store(partial)
    caplog.set_level("INFO", logger="pipeline")
    path = prepare_tokens(of_stage_02, tokenizer, cache)
    documents = (writes - 1) // 2 * 5  # two files are written to, five documents at a time
    assert (f"after {documents} documents from" in caplog.text) == bool(documents)
    assert list((cache / "tokens").iterdir()) == [path]
    fresh_store = prepare_tokens(of_stage_02, tokenizer, tmp_path / "fresh")
    files = [
        [entry["digest"] for entry in json.loads((p / "manifest.json").read_text())["files"]]
        for p in (path, fresh_store)
    ]
    assert files[0] == files[1]


def test_a_failing_disk_loses_no_finished_work(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path, caplog, monkeypatch
) -> None:
    """Finished documents are kept, even if the record of progress cannot be read for a while."""
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 5)
    monkeypatch.setattr(split_writer, "_SAVE_PROGRESS_S", 0)
    monkeypatch.setattr(reading, "_PAUSES_S", ())
    cache = tmp_path / ".cache"
    documents = Dataset.documents
    read = records.read_json

    def torn(*arguments: object) -> Iterator[list[bytes]]:
        yield from itertools.islice(documents(*arguments), 4)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(of_stage_02))

    def failing(path: Path) -> object:
        if path.name.endswith("progress.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(Dataset, "documents", torn)
        prepare_tokens(of_stage_02, tokenizer, cache)
    with monkeypatch.context() as patch, pytest.raises(StageError, match=r"progress.json cannot"):
        patch.setattr(records, "read_json", failing)
        prepare_tokens(of_stage_02, tokenizer, cache)
    caplog.set_level("INFO", logger="pipeline")
    prepare_tokens(of_stage_02, tokenizer, cache)
    assert "20 documents" in caplog.text


def test_a_rank_that_waits_does_not_build(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    launch, printed = start_building(of_stage_02, tokenizer, tmp_path / ".cache", 0, LOCAL_RANK="1")
    wait_for(printed, "waiting for")
    time.sleep(0.7)
    assert not launch.poll() and not (tmp_path / ".cache").exists()
    launch.kill()


def test_tokens_by_pread_equal_the_mapped_ones(
    tmp_path: Path,
    of_stage_02: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = prepare_tokens(of_stage_02, tokenizer, tmp_path)
    mapped = store.open_store(path).splits["train"]

    def refuse(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(np, "memmap", refuse)
    read = store.open_store(path).splits["train"]
    assert "cannot be mapped" in caplog.text
    assert len(read.tokens) == len(mapped.tokens) and read.tokens.dtype == mapped.tokens.dtype
    for part in (slice(0, 10), slice(7, 7), slice(len(mapped.tokens) - 3, 10**9), slice(5, 3)):
        assert np.array_equal(read.tokens[part], mapped.tokens[part])
    places = np.array([[4, 0], [9, len(mapped.tokens) - 1]])
    assert np.array_equal(read.tokens[places], mapped.tokens[places])
    assert read.ends[3] == mapped.ends[3] and np.array_equal(np.asarray(read.ends), mapped.ends)
    for seq_length in (8, 16):
        chosen = np.array([3, 0, 5])
        assert np.array_equal(
            Windows(read.tokens, seq_length).read_samples(chosen).inputs,
            Windows(mapped.tokens, seq_length).read_samples(chosen).inputs,
        )
    with (path / "train.tokens.bin").open("r+b") as file:
        file.truncate(16)
    with pytest.raises(OSError, match="ends at byte 16"):
        read.tokens[0:100]


def test_a_store_with_an_unknown_label_mask_is_refused(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    path = prepare_tokens(of_stage_02, tokenizer, tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    assert content["summary"]["label_mask"] is None
    content["summary"]["label_mask"] = "*.mask.bin"
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="label mask"):
        store.open_store(path)


def test_preparing_again_verifies_every_byte(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    path = prepare_tokens(of_stage_02, tokenizer, tmp_path)
    build.prepare_store(tokenization(of_stage_02, tokenizer), tmp_path, 9999, verify=True)
    damaged = bytearray((path / "train.tokens.bin").read_bytes())
    damaged[8] ^= 1
    (path / "train.tokens.bin").write_bytes(damaged)
    with pytest.raises(ArtifactError, match="damaged"):
        build.prepare_store(tokenization(of_stage_02, tokenizer), tmp_path, 9999, verify=True)


def test_two_nodes_without_common_locks_build_one_store(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path
) -> None:
    """If flock is local to a node, both build, and one uses what the other has published."""
    cache = tmp_path / ".cache"
    fresh_store = prepare_tokens(of_stage_02, tokenizer, tmp_path / "fresh")
    first = start_building(of_stage_02, tokenizer, cache, 0.1, "a")
    wait_for(first[1], "writing")
    second = start_building(of_stage_02, tokenizer, cache, 0, "b")
    outputs = [printed.read() for _, printed in (second, first)]
    assert [launch.wait() for launch, _ in (first, second)] == [[0]] * 2
    [path] = (cache / "tokens").iterdir()
    assert "tokenising" in outputs[0]
    assert [output.splitlines()[-1] for output in outputs] == [str(path)] * 2
    assert [(path / name).read_bytes() for name in FILES] == [
        (fresh_store / name).read_bytes() for name in FILES
    ]


def test_a_store_is_read_back_before_it_is_published(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process wrote into the same file, which keeps its size."""
    sync = split_writer.Sink.sync

    def disturbed(sink: split_writer.Sink) -> None:
        sync(sink)
        if sink.bytes > 8:
            with sink.path.open("r+b") as file:
                file.write(bytes(8))

    monkeypatch.setattr(split_writer.Sink, "sync", disturbed)
    with pytest.raises(ArtifactError, match="read back"):
        prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache")
    assert not list((tmp_path / ".cache/tokens").iterdir())


@pytest.mark.parametrize("moment", ["check_content", "sample", "documents"])
@pytest.mark.parametrize("way", ["replaced", "written", "cut"])
def test_a_dataset_that_changes_while_it_is_tokenised_gives_no_store(
    tmp_path: Path,
    of_stage_02: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    way: str,
) -> None:
    """`02 --overwrite` replaces it between two splits, or a shard is written to or cut."""
    other = Path(shutil.copytree(of_stage_02, tmp_path / "other"))
    (other / "train").rename(other / "t")
    (other / "validation").rename(other / "train")
    (other / "t").rename(other / "validation")
    act = getattr(Dataset, moment)
    shard = next((of_stage_02 / "validation").glob("*.arrow"))

    def disturbed(*arguments: object) -> object:
        result = list(act(*arguments)) if moment == "documents" else act(*arguments)
        if way == "replaced" and other.exists():
            of_stage_02.rename(tmp_path / "old")
            other.rename(of_stage_02)
        elif way != "replaced":
            data = shard.read_bytes()
            shard.write_bytes(data[:-8] + (b"01234567" if way == "written" else b""))
        return result

    monkeypatch.setattr(Dataset, moment, disturbed)
    with pytest.raises((UsageError, ArtifactError)) as caught:
        prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache")
    assert "replaced or changed" in caught.value.problem or way == "cut"
    assert not list((tmp_path / ".cache/tokens").iterdir()), "a partial store was kept"


def test_a_tokenizer_that_is_replaced_while_it_is_read_gives_no_store(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_tokenizer(tmp_path / "other", bos=False)
    make = build.Encoder

    def disturbed(*arguments: object) -> build.Encoder:
        shutil.copy(other / "tokenizer.json", tokenizer)
        return make(*arguments)

    monkeypatch.setattr(build, "Encoder", disturbed)
    with pytest.raises(UsageError, match=r"tokenizer in .* replaced"):
        prepare_tokens(of_stage_02, tokenizer, tmp_path / ".cache")
    assert not list((tmp_path / ".cache/tokens").iterdir())


def test_a_changed_foreign_dataset_is_tokenised_from_the_start(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint covers only the ends of its shards, so a resumed build compares times too."""
    import datasets

    text = ["a" * 30_000 + f" {n}" for n in range(100)]
    path = tmp_path / "foreign"
    cache = tmp_path / ".cache"
    datasets.Dataset.from_dict({"text": text}).save_to_disk(str(path))
    run = TextWriter.run

    def killed(*arguments: object) -> None:
        run(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TextWriter, "run", killed)
        prepare_tokens(path, tokenizer, cache)
    shard = next(path.glob("*.arrow"))
    data = bytearray(shard.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = b"bbbbbbbb"
    shard.write_bytes(data)
    opened = store.open_store(prepare_tokens(path, tokenizer, cache)).splits["train"]
    fresh = store.open_store(prepare_tokens(path, tokenizer, tmp_path / "fresh")).splits["train"]
    assert np.array_equal(opened.tokens, fresh.tokens)


def half_overwritten(path: Path) -> None:
    """Write another store's bytes over the first half of a file, as a copy that was cut short."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size // 2))


def test_a_modified_store_is_hashed_before_it_is_used(
    tmp_path: Path, of_stage_02: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes are right. Files that have not changed since the last check are not hashed."""
    monkeypatch.setattr(build.verified, "_RACY_NS", -(10**18))
    hashed: list[str] = []
    damage = build.verified.manifest.describe_damage

    def note_and_check(path: Path, entry: dict, deep: bool, **options: Any) -> str:
        if deep:
            hashed.append(path.name)
        return damage(path, entry, deep, **options)

    monkeypatch.setattr(build.verified.manifest, "describe_damage", note_and_check)
    cache = tmp_path / ".cache"
    path = prepare_tokens(of_stage_02, tokenizer, cache)
    hashed.clear()
    prepare_tokens(of_stage_02, tokenizer, cache)
    assert "train.tokens.bin" not in hashed
    os.utime(path / "train.ends.bin")
    prepare_tokens(of_stage_02, tokenizer, cache)
    assert "train.tokens.bin" in hashed
    half_overwritten(path / "train.tokens.bin")
    with pytest.raises(ArtifactError, match=r"token store .*damaged") as caught:
        prepare_tokens(of_stage_02, tokenizer, cache)
    assert "other content" in caught.value.found
    assert f"rm -r {path}" in caught.value.run
    monkeypatch.setenv("LOCAL_RANK", "1")
    prepare_tokens(of_stage_02, tokenizer, cache)  # one rank of a machine does it for all


def test_a_tokenizer_without_eos_is_warned_about(
    tmp_path: Path,
    of_stage_02: Path,
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("pipeline"), "propagate", True)
    prepare_tokens(of_stage_02, tokenizer, tmp_path / "with")
    assert "no EOS token" not in caplog.text
    without = tmp_path / "without"
    shutil.copytree(tokenizer, without)
    config = json.loads((without / "tokenizer_config.json").read_text())
    (without / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    prepare_tokens(of_stage_02, without, tmp_path / "cache")
    assert "no EOS token" in caplog.text
