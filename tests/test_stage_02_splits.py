# covers: lib/core/data_names.py, lib/corpus/inputs.py, lib/corpus/row_options.py
# covers: lib/corpus/field_sample.py
"""Validation and test data beside training data, through stages 01 and 02."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.training import load_dataset, read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
ORGANISE = "01_organize_data.py"


def write_rows(path: Path, label: str, count: int, chat: bool = False) -> None:
    """Write records whose texts begin with a label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        text = f"{label} row {number}"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"messages": turns} if chat else {"text": text}) + "\n")
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def read_rows(directory: Path) -> dict[str, set[str]]:
    """Return the first words of the rows by split."""
    dataset = load_dataset(directory)
    splits = dataset.items() if isinstance(dataset, dict) else [("train", dataset)]
    return {
        name: {str(row.get("text") or row["messages"][-1]["content"]).split()[0] for row in split}
        for name, split in splits
    }


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    root = tmp_path / "raw_text"
    write_rows(root / "train.jsonl", "train", 6)
    write_rows(root / "valid.jsonl", "valid", 2)
    write_rows(root / "test.jsonl", "test", 2)
    return root


def test_validation_becomes_a_split_and_test_data_stays_out(stage, raw, tmp_path):
    planned = stage(SCRIPT, "--data-folder", raw, "--dry-run").stdout
    assert "valid.jsonl" in planned and "test.jsonl" in planned and "--splits-by-name" in planned
    done = stage(SCRIPT, "--data-folder", raw)
    corpus = tmp_path / "hf_datasets/corpus"
    assert read_rows(corpus) == {"train": {"train"}, "validation": {"valid"}}
    assert "6 train, 2 validation rows" in done.stdout
    [problem] = map(json.loads, (corpus / "errors.jsonl").read_text().splitlines())
    assert problem["path"] == "test.jsonl" and problem["kind"] == "test data"
    refused = stage(SCRIPT, "--data-folder", raw, "--splits-by-name", "off", expect=2)
    assert "--splits-by-name" in refused.stderr
    stage(SCRIPT, "--data-folder", raw, "--splits-by-name", "off", "--overwrite")
    assert read_rows(corpus) == {"train": {"train", "valid", "test"}}


def test_a_dataset_with_mixed_splits_is_not_already_done(stage, raw, tmp_path):
    """Before, validation files were read as training data: the same files, other rows."""
    (raw / "test.jsonl").unlink()
    stage(SCRIPT, "--data-folder", raw)
    path = tmp_path / "hf_datasets/corpus/manifest.json"
    content = json.loads(path.read_text())
    del content["identity"]["inputs"]["named_splits"]
    path.write_text(json.dumps(content))
    refused = stage(SCRIPT, "--data-folder", raw, expect=2)
    assert "named_splits" in refused.stderr


@pytest.mark.slow
def test_named_splits_survive_stage_01_machines_and_workers(stage, raw, tmp_path):
    write_rows(raw / "other/train-0.json.gz", "train", 40)
    write_rows(raw / "other/test-0.json.gz", "test", 40)
    planned = stage(ORGANISE, "--num-dirs", 5).stdout
    assert "test.jsonl" in planned
    options = ("--validation-percent", 20, "--dedup", "exact")
    stage(SCRIPT, *options, "--save-dir", "one", "--num-workers", 3)
    rows = read_rows(tmp_path / "one")
    assert rows == {"train": {"train"}, "validation": {"valid", "train"}}
    for number in range(5):
        stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", number)
    stage(SCRIPT, *options, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == read_dataset_files(tmp_path / "one")


@pytest.mark.slow
def test_conversations_keep_their_named_splits(stage, tmp_path):
    for name in ("train", "dev", "heldout"):
        write_rows(tmp_path / f"raw_text/{name}/0.jsonl", name, 5, chat=True)
    stage(SCRIPT, "--data-folder", "raw_text", "--format", "chat")
    assert read_rows(tmp_path / "hf_datasets/corpus") == {"train": {"train"}, "validation": {"dev"}}


@pytest.mark.slow
def test_only_held_out_data_is_refused_and_lone_test_data_is_named(stage, raw, tmp_path):
    (raw / "train.jsonl").unlink()
    refused = stage(SCRIPT, "--data-folder", raw, expect=2)
    assert "no training data" in refused.stderr and "--splits-by-name off" in refused.stderr
    (raw / "valid.jsonl").rename(raw / "corpus.jsonl")
    done = stage(SCRIPT, "--data-folder", raw)
    assert "test.jsonl" in done.stdout and "--exclude" in done.stdout
    assert read_rows(tmp_path / "hf_datasets/corpus") == {"train": {"valid", "test"}}


@pytest.mark.slow
def test_the_plan_says_which_fields_would_be_trained(stage, tmp_path):
    crawl = {"text": "a page", "url": "https://a.b", "meta": {"dump": "CC-1"}, "score": 0.5}
    raw = tmp_path / "raw_text"
    raw.mkdir()
    for name, record in (("crawl", crawl), ("plain", {"text": "a", "n": 1}), ("no", {"a": "b"})):
        with gzip.open(raw / f"{name}.jsonl.gz", "wt") as file:
            file.write(f"{json.dumps(record)}\n" * 30)
    words = (SCRIPT, "--data-folder", raw, "--dry-run")
    assert "--fields text" not in stage(*words).stdout  # a third of the records has no text
    (raw / "no.jsonl.gz").unlink()
    planned = stage(*words).stdout
    assert "--fields text" in planned and "url" in planned and "meta.dump" in planned
    assert "sampled" not in stage(*words, "--fields", "text").stdout
    (raw / "crawl.jsonl.gz").unlink()
    (raw / "damaged.jsonl").write_bytes(b"\xff{bad")
    assert "sampled" not in stage(*words).stdout


@pytest.mark.slow
def test_messages_name_the_next_command_the_source_and_the_packages(stage, raw, tmp_path):
    (raw / "page.html").write_text("<html><body>text</body></html>")
    missing = stage(SCRIPT, "--data-folder", "other_splits", expect=3)
    assert "other_splits does not exist" in missing.stderr and "01_organize" in missing.stderr
    stage(ORGANISE, "--num-dirs", 2)
    model = tmp_path / ".cache/models/org--name"
    model.mkdir(parents=True)
    (model / "manifest.json").write_text("{}")
    done = stage(SCRIPT)
    assert "-m org/name" in done.stdout and "03_download" not in done.stdout
    other = tmp_path / "elsewhere"
    write_rows(other / "a.jsonl", "other", 1)
    refused = stage(ORGANISE, "--num-dirs", 2, "--src-dir", other, expect=2)
    assert "raw_text there" in refused.stderr and "elsewhere now" in refused.stderr
    assert "fingerprint" not in refused.stderr
