# covers: lib/tokens/dataset.py, lib/tokens/dataset_errors.py, lib/tokens/columns.py
"""Datasets of stage 02 and of other programs, intact or damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow
import pytest

from lib.core import reading, records
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.tokens.dataset import Dataset, find_dataset, open_dataset

from .conftest import TEXTS


def texts(dataset: Dataset, split: str = "train") -> list[str]:
    return [text.decode() for batch in dataset.documents(split) for text in batch]


def save_dict(path: Path, **splits: list[str]) -> Path:
    import datasets

    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
    ).save_to_disk(str(path))
    return path


def test_a_dataset_of_stage_02(of_stage_02: Path) -> None:
    dataset = open_dataset(of_stage_02)
    assert dataset.is_of_stage_02 and list(dataset.splits) == ["train", "validation"]
    dataset.check_content()
    train, validation = (texts(dataset, split) for split in dataset.splits)
    assert len(train) + len(validation) == 60 and validation
    assert all(text.startswith("document number ") for text in train + validation)


def test_a_foreign_dataset_is_one_split(foreign: Path) -> None:
    dataset = open_dataset(foreign)
    assert dataset.splits == {"train": [first_shard(foreign)]} and not dataset.is_of_stage_02
    assert texts(dataset) == TEXTS
    dataset.check_content()


def test_a_foreign_dataset_dict_gives_train_and_validation(tmp_path: Path) -> None:
    path = save_dict(tmp_path / "d", train=["a", "b"], validation=["c"], test=["d"])
    dataset = open_dataset(path)
    assert list(dataset.splits) == ["train", "validation"]
    assert [texts(dataset, split) for split in dataset.splits] == [["a", "b"], ["c"]]


def plain(folder: Path, **files: list[str]) -> Path:
    """Write Arrow streams as `datasets` caches them, with nothing beside them."""
    folder.mkdir()
    for name, rows in files.items():
        table = pyarrow.table({"text": rows, "id": range(len(rows))})
        with pyarrow.ipc.new_stream(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return folder


def test_arrow_files_without_a_description(tmp_path: Path) -> None:
    cached = plain(
        tmp_path / "cached",
        **{
            "corpus-train-00000-of-00002": ["a", "b", "c"],
            "corpus-train-00001-of-00002": ["d"],
            "corpus-validation": ["e"],
            "corpus-test": ["f"],
            "cache-1f2e": ["g"],
        },
    )
    dataset = open_dataset(cached)
    assert {name: texts(dataset, name) for name in dataset.splits} == {
        "train": ["a", "b", "c", "d"],
        "validation": ["e"],
    }
    assert dataset.extent() == (4, 4) and dataset.total_bytes() and dataset.sample(texts=2)
    assert [text for batch in dataset.documents("train", first=2) for text in batch] == [b"c", b"d"]
    one = open_dataset(cached / "corpus-validation.arrow")
    assert texts(one) == ["e"] and one.fingerprint != dataset.fingerprint
    assert texts(open_dataset(plain(tmp_path / "one", whatever=["h"]))) == ["h"]
    moved = cached.rename(tmp_path / "moved")
    assert open_dataset(moved).fingerprint == dataset.fingerprint
    with pytest.raises(UsageError, match="was replaced or changed"):
        plain(cached, **{"corpus-train": ["x"]})
        dataset.require_same()


def test_arrow_files_of_the_other_format_and_damaged_ones(tmp_path: Path) -> None:
    table = pyarrow.table({"text": pyarrow.array(["a", None], pyarrow.large_string())})
    with pyarrow.ipc.new_file(str(tmp_path / "random.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert texts(open_dataset(tmp_path / "random.arrow")) == ["a", ""]
    folder = plain(tmp_path / "d", a=["text"] * 500)
    shard = folder / "a.arrow"
    shard.write_bytes(shard.read_bytes()[:-3000])
    with pytest.raises(ArtifactError, match=r"a\.arrow cannot be read"):
        texts(open_dataset(folder))
    shard.write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match=r"a\.arrow cannot be read"):
        open_dataset(shard)
    with pytest.raises(UsageError, match="no column `text`") as caught:
        open_dataset(write_ids(tmp_path / "ids.arrow"))
    assert caught.value.found == "columns input_ids" and "tokenised already" in caught.value.hint
    with pytest.raises(UsageError, match="split `train`"):
        open_dataset(plain(tmp_path / "tests", **{"corpus-test": ["a"]}))


def write_ids(path: Path) -> Path:
    table = pyarrow.table({"input_ids": [1, 2]})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_the_name_of_a_hub_dataset_is_answered_with_preparing_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "-e", "x", "-d", "org/some-text"])

    def missing_error(name: str = "org/some-text") -> StageError:
        with pytest.raises(ArtifactError) as caught:
            open_dataset(find_dataset(name))
        return caught.value

    # All files of a dataset may be terabytes: of one whose files are not known, the description.
    assert missing_error().run.endswith(
        "03_download_model.py --dataset-name org/some-text --include README.md"
    )
    fetch, build, train = missing_error("allenai/c4").run.splitlines()
    assert fetch.endswith("--include 'en/c4-train.0000*-of-01024.json.gz'")
    assert "3 GB" in missing_error("allenai/c4").hint and build.endswith("hf_datasets/allenai--c4")
    fetched = tmp_path / "raw_text/org--some-text"
    (fetched / ".hub").mkdir(parents=True)
    (fetched / ".hub/manifest.json").write_text("{}")
    (fetched / "README.md").write_text("files: data/*.parquet")
    assert not missing_error().run and "--include GLOB" in missing_error().hint
    (fetched / "a.jsonl").write_text('{"text": "a"}\n')
    build, train = missing_error().run.splitlines()
    assert build.endswith(
        "02_build_hf_dataset.py --data-folder raw_text/org--some-text --save-dir "
        "hf_datasets/org--some-text"
    )
    assert train.endswith("04_train_fsdp.py -e x -d org/some-text")
    (fetched / "a.jsonl").write_text('{"messages": []}\n')
    assert missing_error().run.splitlines() == [f"{build} --format chat", train]
    plain_dir = tmp_path / "home/datasets/org___some-text/default/0.0.0"
    plain_dir.mkdir(parents=True)
    plain(plain_dir / "1f", **{"some-text-train": ["a"]})
    assert missing_error().run.endswith(f"-d {plain_dir}/1f")
    save_dict(Path("hf_datasets/org--some-text"), train=["a"])
    assert texts(open_dataset(find_dataset("org/some-text"))) == ["a"]
    for name in ("hf_datasets/other", "raw_text/other", "other", "other/a.arrow", "a/b/c"):
        assert "does not exist" in missing_error(name).problem


def test_a_dataset_without_a_train_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no split `train`") as caught:
        open_dataset(save_dict(tmp_path / "d", test=["d"]))
    assert "test" in caught.value.found


def test_text_in_many_shards_and_with_nulls_comes_in_order(tmp_path: Path) -> None:
    import datasets

    rows = [None if n % 10 == 3 else f"row {n}" for n in range(3000)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(tmp_path / "d"), num_shards=3)
    assert texts(open_dataset(tmp_path / "d")) == [row or "" for row in rows]


@pytest.mark.parametrize("columns", [{"content": ["a"]}, {"text": [1]}])
def test_a_dataset_without_a_text_column_is_refused(tmp_path: Path, columns: dict) -> None:
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match="no column `text`") as caught:
        open_dataset(tmp_path / "d")
    assert next(iter(columns)) in caught.value.found


def test_the_error_for_a_missing_dataset_lists_others_and_leftovers(
    of_stage_02: Path, monkeypatch
) -> None:
    monkeypatch.chdir(of_stage_02.parents[1])
    with pytest.raises(ArtifactError, match="does not exist") as caught:
        open_dataset(find_dataset("other"))
    assert caught.value.found == "finished under hf_datasets/: corpus"
    assert "-d" in caught.value.hint
    Path("hf_datasets/other.partial-1").mkdir()
    with pytest.raises(ArtifactError) as caught:
        open_dataset(Path("hf_datasets/other"))
    assert "other.partial-1" in caught.value.found
    assert find_dataset("corpus") == Path("hf_datasets/corpus")
    assert find_dataset("hf_datasets/corpus") == Path("hf_datasets/corpus")


def test_an_unfinished_dataset_of_stage_02_is_refused(of_stage_02: Path) -> None:
    """The leftovers of a killed stage 02 are neither our dataset nor a foreign one."""
    partial = of_stage_02.rename(of_stage_02.with_name("corpus.partial-81f3"))
    (partial / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="not finished"):
        open_dataset(partial)


def test_another_artifact_is_refused_as_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "splits/1", "files": []}')
    with pytest.raises(UsageError, match="is not a dataset"):
        open_dataset(tmp_path)


def test_a_directory_of_text_is_refused_as_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match="dataset directory") as caught:
        open_dataset(tmp_path)
    assert "a.txt" in caught.value.found and "02_build_hf_dataset.py" in caught.value.run


def first_shard(path: Path) -> Path:
    return next(iter(sorted(path.rglob("*.arrow"))))


def test_a_truncated_shard_is_found_at_once_and_a_changed_one_by_its_digest(
    of_stage_02: Path,
) -> None:
    shard = first_shard(of_stage_02)
    data = bytearray(shard.read_bytes())
    shard.write_bytes(data[:-8])
    with pytest.raises(ArtifactError, match="is damaged") as caught:
        open_dataset(of_stage_02)
    assert shard.name in caught.value.found
    assert "--data-folder raw " in caught.value.hint and "--overwrite" in caught.value.hint
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    dataset = open_dataset(of_stage_02)
    with pytest.raises(ArtifactError, match="is damaged"):
        dataset.check_content()


@pytest.mark.parametrize("damage", ["no info", "no state", "torn state", "no shard", "torn dict"])
def test_a_damaged_foreign_dataset_is_reported(tmp_path: Path, damage: str) -> None:
    path = save_dict(tmp_path / "d", train=["a"] * 100)
    if damage == "no info":
        (path / "train/dataset_info.json").unlink()
    elif damage == "no state":
        (path / "train/state.json").unlink()
    elif damage == "torn state":
        (path / "train/state.json").write_text("{")
    elif damage == "no shard":
        first_shard(path).unlink()
    else:
        (path / "dataset_dict.json").write_text('{"splits"')
    with pytest.raises(ArtifactError, match="is damaged"):
        open_dataset(path)


def test_a_failing_disk_is_not_reported_as_damage(tmp_path: Path, monkeypatch) -> None:
    path = save_dict(tmp_path / "d", train=["a"] * 100)
    read = records.read_json
    fails = [1]

    def failing(path: Path) -> object:
        if path.name == "state.json" and fails[0]:
            fails[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(records, "read_json", failing)
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0,))
    dataset = open_dataset(path)
    fails[0] = 2
    with pytest.raises(StageError, match=r"state.json cannot .*not mean"):
        open_dataset(path)

    def lost(file: object) -> None:
        raise OSError(errno.ESTALE, "Error reading bytes from file")

    monkeypatch.setattr(pyarrow.ipc, "open_stream", lost)
    with pytest.raises(OSError, match=r"Stale file handle: .*train"):
        texts(dataset)


@pytest.mark.parametrize("name", ["../../mine/data-00000-of-00001.arrow", "data.bin"])
def test_files_outside_the_dataset_are_not_read(tmp_path: Path, name: str) -> None:
    """Files that the fingerprint does not cover are refused."""
    path = save_dict(tmp_path / "d", train=["a"] * 100)
    save_dict(tmp_path / "mine", train=["secret"])
    shutil.copy(first_shard(path), path / "train/data.bin")
    state = json.loads((path / "train/state.json").read_text())
    state["_data_files"] = [{"filename": f"../{name}" if name.startswith(".") else name}]
    (path / "train/state.json").write_text(json.dumps(state))
    with pytest.raises(ArtifactError, match="is damaged"):
        open_dataset(path)


def test_a_truncated_foreign_shard_is_reported_when_it_is_read(tmp_path: Path) -> None:
    path = save_dict(tmp_path / "d", train=[f"some text {n}" for n in range(2000)])
    shard = first_shard(path)
    shard.write_bytes(shard.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match="cannot be read"):
        texts(open_dataset(path))


def test_a_moved_dataset_has_the_same_fingerprint(of_stage_02: Path, foreign: Path) -> None:
    for path in (of_stage_02, foreign):
        before = open_dataset(path).fingerprint
        moved = path.rename(path.with_name("moved"))
        assert open_dataset(moved).fingerprint == before
        copied = Path(shutil.copytree(moved, path.with_name("copied")))
        assert open_dataset(copied).fingerprint == before


def test_other_text_has_another_fingerprint(tmp_path: Path, of_stage_02: Path) -> None:
    marks = {
        open_dataset(save_dict(tmp_path / name, train=rows)).fingerprint
        for name, rows in (("1", ["a"]), ("2", ["b"]), ("3", ["a", "a"]))
    }
    assert len(marks) == 3
    content = json.loads((of_stage_02 / "manifest.json").read_text())
    before = open_dataset(of_stage_02).fingerprint
    entry = next(e for e in content["files"] if e["path"].endswith(".arrow"))
    entry["digest"] = "xxh3:0"
    (of_stage_02 / "manifest.json").write_text(json.dumps(content))
    assert open_dataset(of_stage_02).fingerprint != before


def test_splits_saved_one_by_one_are_opened_one_at_a_time(tmp_path: Path, monkeypatch) -> None:
    saved = save_dict(tmp_path / "d", train=["a"], test=["b"])
    (saved / "dataset_dict.json").unlink()
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py", "-e", "x", "-d", str(saved)])
    with pytest.raises(UsageError, match="not a dataset") as caught:
        open_dataset(saved)
    assert caught.value.run.endswith(f"-e x -d {saved / 'train'}")


@pytest.mark.parametrize(
    ("columns", "trainer", "source"),
    [
        (("attention_mask", "labels", "images", "videos", "audios"), "LLaMA-Factory", "_info.json"),
        (("completion_mask",), "TRL", "SFTTrainer"),
        (("seq_lengths",), "TRL", "SFTTrainer"),
        (("attention_mask", "labels", "position_ids"), "Axolotl", "YAML file"),
        (("attention_mask", "labels"), "another program", "the texts or the conversations"),
    ],
)
def test_datasets_that_other_trainers_have_tokenised_are_refused(
    tmp_path: Path, columns: tuple[str, ...], trainer: str, source: str
) -> None:
    import datasets

    rows = {name: [[1, 2], [3]] for name in ("input_ids", *columns)}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"), num_shards=2)
    with pytest.raises(UsageError, match="has no column `text`") as caught:
        open_dataset(tmp_path / "d")
    assert trainer in caught.value.hint and source in caught.value.hint


def test_nested_columns_beside_the_text_and_many_shards_are_accepted(tmp_path: Path) -> None:
    import datasets

    rows = {
        "text": [f"text {index}" for index in range(40)],
        "meta": [{"a": {"b": [1, 2]}, "tags": ["x"]}] * 40,
        "turns": [[{"role": "user", "parts": [{"kind": "text"}]}]] * 40,
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"), num_shards=7)
    texts = [text for part in open_dataset(tmp_path / "d").documents("train") for text in part]
    assert texts == [text.encode() for text in rows["text"]]


def test_a_split_without_rows_and_odd_columns_are_named(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(UsageError, match="d/validation has no column") as caught:
        open_dataset(save_dict(tmp_path / "d", train=["a"], validation=[]))
    assert caught.value.found.startswith("`text` without a value") and not caught.value.hint
    labels = datasets.Features(text=datasets.ClassLabel(names=["a"]))
    datasets.Dataset.from_dict({"text": ["a"]}, features=labels).save_to_disk(str(tmp_path / "l"))
    with pytest.raises(UsageError) as caught:
        open_dataset(tmp_path / "l")
    assert caught.value.found == "`text` of ClassLabel"
