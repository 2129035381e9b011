# covers: lib/corpus/scan.py, lib/corpus/saved.py
"""Directories that `save_to_disk` wrote, as input of stages 01 and 02."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import datasets
import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.corpus import saved
from lib.corpus.scan import DESCRIPTION, Rules, scan_tree
from tests.conftest import ROOT

ORGANISE = "01_organize_data.py"
BUILD = "02_build_hf_dataset.py"


def run_script(script: str, *words: object) -> None:
    runpy.run_path(str(ROOT / script))["main"]([*map(str, words), "--no-progress"])


def texts(split: str, count: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"{split} {n}" for n in range(count)]})


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a DatasetDict with 20 rows of train and 10 of test."""
    monkeypatch.chdir(tmp_path)
    datasets.DatasetDict({"train": texts("train", 20), "test": texts("test", 10)}).save_to_disk(
        "both"
    )
    return Path("both")


@pytest.fixture
def languages(both: Path) -> Path:
    """Return a DatasetDict whose names do not say what the splits are for."""
    datasets.DatasetDict({"en": texts("en", 20), "de": texts("de", 10)}).save_to_disk("dict")
    return Path("dict")


def test_splits_are_not_mixed(languages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [BUILD, "--data-folder", "dict", "--save-dir", "out"])
    with pytest.raises(UsageError, match="several splits") as caught:
        run_script(BUILD, "--data-folder", languages, "--save-dir", "out")
    assert caught.value.found == "de, en"
    assert caught.value.run.endswith("--save-dir out --data-folder dict/en")
    run_script(BUILD, "--data-folder", languages / "en", "--save-dir", "out")
    assert datasets.load_from_disk("out")["text"][:] == [f"en {n}" for n in range(20)]


@pytest.mark.parametrize("held_out", ["test", "validation", "dev"])
@pytest.mark.parametrize("is_dict", [True, False], ids=["a dict", "one by one"])
def test_splits_are_kept_apart_by_name(both: Path, held_out: str, is_dict: bool) -> None:
    (both / "test").rename(both / held_out)
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", held_out]}))
    if not is_dict:
        (both / "dataset_dict.json").unlink()
    Path("raw").mkdir()
    both.rename("raw/both")
    run_script(BUILD, "--data-folder", "raw", "--save-dir", "plain")
    run_script(ORGANISE, "--src-dir", "raw", "--dst-root", "splits", "--num-dirs", 2)
    run_script(BUILD, "--data-folder", "splits", "--save-dir", "out")
    for name in ("plain", "out"):
        saved_splits = datasets.load_from_disk(name)
        train = saved_splits if held_out == "test" else saved_splits["train"]
        assert sorted(train["text"]) == sorted(f"train {n}" for n in range(20))
        assert held_out == "test" or len(saved_splits["validation"]) == 10


def test_splits_in_a_source_of_stage_01_are_not_mixed(languages: Path) -> None:
    Path("raw").mkdir()
    languages.rename("raw/dict")
    with pytest.raises(UsageError, match="raw/dict contains several splits"):
        run_script(ORGANISE, "--src-dir", "raw", "--dst-root", "splits")
    words = ("--src-dir", "raw", "--dst-root", "splits", "--num-dirs", 1)
    run_script(ORGANISE, *words, "--exclude", "dict/de")
    assert len([*Path("splits").rglob("*.arrow")]) == 1
    assert not [*Path("splits").rglob("state.json")]
    run_script(BUILD, "--data-folder", "splits", "--save-dir", "out")
    assert len(datasets.load_from_disk("out")) == 20


def test_metadata_of_a_dataset_gives_no_row(tmp_path: Path) -> None:
    dataset = texts("train", 40)
    dataset.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved/cache-0123.arrow").write_bytes(
        next((tmp_path / "saved").glob("data-*.arrow")).read_bytes()
    )
    run_script(BUILD, "--data-folder", tmp_path / "saved", "--save-dir", tmp_path / "out")
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 40
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "out/errors.jsonl").read_text().splitlines()
    ]
    assert kinds == [DESCRIPTION] * 3


def test_data_files_with_names_of_metadata_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in (
        ("state.json", {"text": "Ohio"}),
        ("dataset_info.json", {"features": 1}),
        ("dataset_dict.json", [1]),
        ("sub/cache-1.arrow", "x"),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    assert not [entry for entry in scan_tree(tmp_path, Rules()) if entry.skipped]


def test_a_tokenised_dataset_is_refused(tmp_path: Path) -> None:
    """Axolotl prepares such datasets."""
    datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]}).save_to_disk(
        str(tmp_path / "prepared")
    )
    with pytest.raises(UsageError, match="tokenised") as caught:
        run_script(BUILD, "--data-folder", tmp_path / "prepared", "--save-dir", tmp_path / "out")
    assert "input_ids" in caught.value.found and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "column",
    [
        {
            "messages": [
                [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
            ]
        },
        {"sentences": [["One.", "Two."]]},
    ],
    ids=["structs", "strings"],
)
def test_a_dataset_with_nested_text_is_accepted(tmp_path: Path, column: dict) -> None:
    datasets.Dataset.from_dict({**column, "input_ids": [[1, 2]]}).save_to_disk(
        str(tmp_path / "saved")
    )
    saved.require_readable(
        tmp_path / "saved", "--data-folder", scan_tree(tmp_path / "saved", Rules())
    )


def test_an_excluded_tokenised_dataset_is_ignored(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(raw / "prepared"))
    (raw / "note.txt").write_text("a note")
    run_script(ORGANISE, "--src-dir", raw, "--dst-root", tmp_path / "out", "--include", "*.txt")
    assert len([*(tmp_path / "out").rglob("*.txt")]) == 1


@pytest.mark.parametrize("names", ["train", [], ["train", 5], {"train": 1}])
def test_invalid_lists_of_splits_are_damage(both: Path, names: object) -> None:
    (both / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    with pytest.raises(ArtifactError, match=r"dataset_dict\.json is damaged"):
        run_script(BUILD, "--data-folder", both, "--save-dir", "out")


def test_several_saved_corpora_are_read_together(both: Path) -> None:
    (both / "dataset_dict.json").unlink()
    (both / "test").rename(both / "books")
    run_script(BUILD, "--data-folder", both, "--save-dir", "out")
    assert len(datasets.load_from_disk("out")) == 30


def test_the_cache_of_datasets_is_read_without_results_of_map(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} row"}) + "\n")
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    cache = tmp_path / "cache"
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(cache))
    loaded.map(lambda row: {"text": f"mapped {row['text']}"})
    assert [*cache.rglob("cache-*.arrow")]
    run_script(BUILD, "--data-folder", cache, "--save-dir", tmp_path / "out")
    assert datasets.load_from_disk(str(tmp_path / "out"))["text"][:] == ["train row"]


@pytest.mark.parametrize("is_parquet", [False, True], ids=["Arrow", "Parquet"])
def test_the_feature_json_of_datasets_is_read(tmp_path: Path, is_parquet: bool) -> None:
    calls = [{"a": 1, "b": None}, {"items": ["x", {"y": 2}]}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "answer",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": call}}
                    ],
                },
            ]
        }
        for call in calls
    ]
    mixed = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "Json" in str(mixed.features)
    if is_parquet:
        (tmp_path / "saved").mkdir()
        mixed.to_parquet(str(tmp_path / "saved/rows.parquet"))
    else:
        mixed.save_to_disk(str(tmp_path / "saved"))
    words = ("--data-folder", tmp_path / "saved", "--save-dir", tmp_path / "out")
    run_script(BUILD, *words, "--format", "chat")
    built = datasets.load_from_disk(str(tmp_path / "out"))
    stored = [json.loads(row["messages"][1]["tool_calls"]) for row in built]
    assert [call[0]["function"]["arguments"] for call in stored] == calls
    run_script(BUILD, *words, "--overwrite")
    assert "answer" in datasets.load_from_disk(str(tmp_path / "out"))["text"][0]
