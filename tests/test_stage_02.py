# covers: 02_build_hf_dataset.py, lib/corpus/documents.py, lib/corpus/text_documents.py
# covers: lib/corpus/encoding.py, lib/corpus/dedup.py, lib/corpus/pool.py, lib/corpus/readers.py
"""Run stage 02 from the command line."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.corpus import inputs, split_parts, work_units
from lib.corpus.row_options import RowOptions
from tests.training import load_dataset, read_dataset_files

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "02_build_hf_dataset.py"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return raw_text/ with one file of each format."""
    root = tmp_path / "raw_text"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("plain text\n")
    (root / "sub/b.json").write_text('[{"text": "first", "n": 1}, {"text": "second"}]')
    (root / "sub/c.jsonl").write_text('{"text": "third"}\nbad\n{"text": "fourth"}\n')
    (root / "d.yaml").write_text("text: fifth\nwhen: 2001-01-01\n")
    return root


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mixed(root: Path, files: int) -> None:
    """Fill a directory with many files of several formats."""
    draw = random.Random(0)
    for number in range(files):
        words = [f"word{draw.randint(0, 999)}" for _ in range(draw.randint(1, 3000))]
        path = root / f"{number % 7}" / f"{number}{draw.choice(['.txt', '.json', '.jsonl'])}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text(" ".join(words))
        elif path.suffix == ".json":
            path.write_text(json.dumps(words[:50]))
        else:
            path.write_text("".join(json.dumps({"t": word}) + "\n" for word in words) + "bad\n")


def test_help_is_fast_and_names_every_option(stage):
    text = stage(SCRIPT, "--help", timeout=3, fresh=True).stdout
    for option in (
        "--data-folder",
        "--save-dir",
        "--format",
        "--fields",
        "--strings",
        "--min-chars",
        "--validation-percent",
        "--keep-source",
        "--max-error-rate",
        "--config",
        "--dry-run",
        "--overwrite",
        "--num-workers",
        "--no-progress",
    ):
        assert option in text


def test_from_raw_text_to_a_dataset(stage, raw, tmp_path):
    stage("01_organize_data.py", "--num-dirs", 2)
    done = stage(SCRIPT, "--keep-source")
    dataset = load_dataset(tmp_path / "hf_datasets/corpus")
    assert sorted(dataset["text"]) == sorted(
        ["plain text\n", "first", "second", "third", "fourth", "fifth"]
    )
    sources = dict(zip(dataset["text"], dataset["source"], strict=True))
    assert sources["second"] == "sub/b.json" and sources["plain text\n"] == "a.txt"
    entries = lines(tmp_path / "splits/files.jsonl")
    order = {entry["path"]: (entry["split"], entry["path"].encode()) for entry in entries}
    assert list(dataset["source"]) == sorted(dataset["source"], key=order.get)
    assert dataset["text"][:].index("third") + 1 == dataset["text"][:].index("fourth")

    [problem] = lines(tmp_path / "hf_datasets/corpus/errors.jsonl")
    assert (tmp_path / "splits" / problem["path"]).is_file() and problem["line"] == 2
    manifest = json.loads((tmp_path / "hf_datasets/corpus/manifest.json").read_text())
    assert manifest["kind"] == "dataset/1" and manifest["summary"]["rows"] == 6
    assert manifest["summary"]["splits"]["train"]["shards"] == [
        {"path": "data-00000-of-00001.arrow", "rows": 6}
    ]
    for entry in manifest["files"]:
        assert (tmp_path / "hf_datasets/corpus" / entry["path"]).stat().st_size == entry["bytes"]
    assert "6 train rows" in done.stdout and "errors.jsonl" in done.stdout
    assert "-d hf_datasets/corpus" in done.stdout
    assert sorted(path.name for path in (tmp_path / "hf_datasets").iterdir()) == ["corpus"]


def test_a_second_run_is_done_refused_or_replaces(stage, raw, tmp_path):
    stage("01_organize_data.py", "--num-dirs", 2)
    stage(SCRIPT)
    target = tmp_path / "hf_datasets/corpus"
    before = read_dataset_files(target)
    assert "already done" in stage(SCRIPT, "--num-workers", 1).stdout
    (tmp_path / "splits").rename(tmp_path / "elsewhere")
    assert "already done" in stage(SCRIPT, "--data-folder", "elsewhere").stdout
    refused = stage(SCRIPT, "--data-folder", "elsewhere", "--min-chars", 6, expect=2)
    assert "--min-chars: 0 there, 6 now" in refused.stderr and "--overwrite" in refused.stderr
    stage(SCRIPT, "--data-folder", "elsewhere", "--min-chars", 99, "--overwrite", expect=2)
    assert read_dataset_files(target) == before
    stage(SCRIPT, "--data-folder", "elsewhere", "--min-chars", 6, "--overwrite")
    assert len(load_dataset(target)) == 3


def test_options_that_curated_a_dataset_are_named_with_the_new_command(stage, raw, tmp_path):
    for words in (["--language", "en"], ["--quality", "c4", "--mask", "ip"], ["--dedup", "near"]):
        error = stage(SCRIPT, "--data-folder", raw, *words, expect=2).stderr
        for option in words[::2]:
            assert f"python -m lib.curate DATASET --save-dir NEW {option}" in error
    done = stage(SCRIPT, "--data-folder", raw)
    assert "-m lib.curate hf_datasets/corpus --save-dir" in done.stdout
    manifest = tmp_path / "hf_datasets/corpus/manifest.json"
    content = json.loads(manifest.read_text())
    content["options"] |= {"near_bands": 20, "quality": ["gopher"]}  # the first was the default
    manifest.with_name("old.json").write_text(json.dumps(content))
    error = stage(SCRIPT, "--config", "hf_datasets/corpus/old.json", expect=2).stderr
    assert "'quality'" in error and "near_bands" not in error


def test_dry_run_leaves_nothing(stage, raw, tmp_path):
    done = stage(SCRIPT, "--data-folder", raw, "--dry-run")
    assert "4 files" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["raw_text"]


@pytest.mark.slow
def test_workers_do_not_change_a_byte(stage, tmp_path):
    mixed(tmp_path / "data", 300)
    (tmp_path / "data/big.jsonl").write_text(
        "".join(json.dumps({"t": f"{i} " * 200}) + "\n" for i in range(40_000)) + "bad\n"
    )
    for workers in (1, 2, 3):
        stage(
            SCRIPT,
            "--data-folder",
            "data",
            "--save-dir",
            f"out/{workers}",
            "--num-workers",
            workers,
            "--validation-percent",
            5,
            "--keep-source",
        )
    one = read_dataset_files(tmp_path / "out/1")
    assert one == read_dataset_files(tmp_path / "out/2") == read_dataset_files(tmp_path / "out/3")
    assert {
        problem["line"]
        for problem in lines(tmp_path / "out/1/errors.jsonl")
        if problem["path"] == "big.jsonl"
    } == {40_001}
    loaded = load_dataset(tmp_path / "out/1")
    assert set(loaded) == {"train", "validation"}
    assert 0.02 < len(loaded["validation"]) / len(loaded["train"]) < 0.08


@pytest.mark.slow
def test_a_killed_build_continues_to_the_same_bytes(stage, tmp_path):
    mixed(tmp_path / "data", 700)
    stage(SCRIPT, "--data-folder", "data", "--save-dir", "whole")
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / SCRIPT),
            "--data-folder",
            "data",
            "--save-dir",
            "out",
            "--num-workers",
            "2",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    parts = "out.partial-*/content-*/*/parts/*"
    while not list(tmp_path.glob(parts)) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    stage(SCRIPT, "--data-folder", "data", "--save-dir", "out")
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")
    assert not list(tmp_path.glob("*.partial-*"))


def test_deep_nesting_loses_only_its_document(stage, tmp_path):
    data = tmp_path / "data"
    data.mkdir()

    def nested(depth: int) -> str:
        return "[" * depth + '"x"' + "]" * depth

    (data / "a.jsonl").write_text(f'"before"\n{nested(1500)}\n{nested(200_000)}\n"after"\n')
    (data / "b.json").write_text(f'["kept", {nested(200_000)}]')
    (data / "c.yaml").write_text(f"kept: too\n---\n{nested(1500)}\n")
    (data / "d.txt").write_text("last")
    stage(SCRIPT, "--data-folder", "data", "--save-dir", "out")
    assert load_dataset(tmp_path / "out")["text"][:] == [
        "before",
        "x",
        "after",
        "kept",
        "too",
        "last",
    ]
    assert [(p["path"], p["kind"]) for p in lines(tmp_path / "out/errors.jsonl")] == [
        ("a.jsonl", "nesting"),
        ("b.json", "nesting"),
        ("c.yaml", "nesting"),
    ]


def test_only_a_file_that_kills_its_worker_is_lost(stage, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("first")
    (data / "b.yaml").write_text("[" * 1_000_000)  # libyaml's composer overflows the C stack
    (data / "c.txt").write_text("last")
    done = stage(SCRIPT, "--data-folder", "data", "--save-dir", "out", expect=None)
    assert done.returncode == 0, done.stderr
    assert load_dataset(tmp_path / "out")["text"][:] == ["first", "last"]
    [problem] = lines(tmp_path / "out/errors.jsonl")
    assert problem["path"] == "b.yaml" and problem["kind"] in ("crash", "nesting", "syntax")


def test_a_plain_directory_with_hostile_names_is_read(stage, tmp_path):
    data = tmp_path / "data"
    (data / ".git").mkdir(parents=True)
    (data / ".git/config").write_text("x")
    (data / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    for name in (b"caf\xe9.txt", b"new\nline.txt", b"bad\xff.json"):
        (data / os.fsdecode(name)).write_bytes(b"text")
    done = stage(SCRIPT, "--data-folder", "data", "--save-dir", "out", "--keep-source")
    assert "plain directory" in done.stdout
    dataset = load_dataset(tmp_path / "out")
    assert set(dataset["source"]) == {"caf\\xe9.txt", "new\\nline.txt"}
    problems = {os.fsencode(p["path"]): p["kind"] for p in lines(tmp_path / "out/errors.jsonl")}
    assert problems == {b".git/": "hidden", b"image.png": "binary", b"bad\xff.json": "mismatch"}


def test_max_error_rate_is_a_fraction_of_the_files(stage, raw, tmp_path):
    options = ["--data-folder", raw, "--save-dir", "out"]
    failed = stage(SCRIPT, *options, "--max-error-rate", 0.2, expect=2)
    assert "1 of 4 files failed" in failed.stderr and "nothing was" in failed.stderr
    assert not (tmp_path / "out").exists()
    assert lines(tmp_path / "out.errors.jsonl")[0]["path"] == "sub/c.jsonl"
    stage(SCRIPT, *options, "--max-error-rate", 0.25)


def test_options_reach_the_rows(stage, raw, tmp_path):
    (tmp_path / "run.yaml").write_text("fields: [n, missing]\nstrings: rows\ndata_folder: raw_text")
    (raw / "e.json").write_text('{"n": ["x", "y"], "text": "no"}')
    done = stage(SCRIPT, "--config", "run.yaml", "--save_dir", "out")
    assert load_dataset(tmp_path / "out")["text"][:] == ["plain text\n", "x", "y"]
    assert "no document has 'missing'" in done.stdout


def test_fields_that_match_little_are_reported_with_other_fields(stage, tmp_path):
    rows = ['{"text": "here"}\n'] * 2 + ['{"body": "b", "meta": {"title": "t"}, "n": 1}\n'] * 23
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_text("".join(rows))
    words = ("--data-folder", "raw", "--save-dir", "out", "--min-chars", 1)
    done = stage(SCRIPT, *words, "--fields", "text")
    assert "2 of 25 documents" in done.stdout
    assert "already done" in stage(SCRIPT, *words, "--fields", "text,text").stdout
    assert "body (23), meta.title (23)" in done.stdout
    (tmp_path / "raw" / "b.txt").write_text("plain text is not touched")
    done = stage(SCRIPT, *words, "--fields", "text,zzz", "--overwrite")
    assert "no document has 'zzz'" in done.stdout
    assert "body (23), meta.title" in done.stdout
    done = stage(SCRIPT, *words, "--fields", "txt", "--overwrite", expect=2)
    assert "--fields txt" in done.stderr
    assert "text (2)" in done.stderr and "body (23)" in done.stderr
    done = stage(SCRIPT, *words, "--min-chars", 2, "--overwrite", "--validation-percent", 60)
    assert "rows dropped" not in done.stdout  # every string of a document counts
    assert re.search(r"--validation-percent 60 leaves \d+ rows?", done.stdout)
    done = stage(SCRIPT, *words, "--strings", "rows", "--min-chars", 2, "--overwrite")
    assert "--min-chars 2 dropped 46 of 49 rows" in done.stdout


def test_damaged_or_unfinished_splits_are_refused(stage, raw, tmp_path):
    missing = stage(SCRIPT, expect=3)
    assert "does not exist" in missing.stderr and "01_organize_data.py" in missing.stderr
    stage("01_organize_data.py", "--num-dirs", 2)
    for damage, words in [
        ("manifest.json", "not finished"),
        ("files.jsonl", "damaged"),
        ("split_00", "missing"),
    ]:
        shutil.copytree(tmp_path / "splits", tmp_path / damage)
        broken = tmp_path / damage / damage
        shutil.rmtree(broken) if broken.is_dir() else broken.unlink()
        done = stage(SCRIPT, "--data-folder", damage, expect=3)
        assert words in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "splits/split_00/stray.txt").write_text("x")
    assert "1 file that files.jsonl" in stage(SCRIPT).stdout


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--data-folder", "bare"], "no file", 2),
        (["--data-folder", "binary"], "no document", 2),
        (["--data-folder", "raw_text/a.txt"], "is a file", 2),
        (["--data-folder", "raw_text", "--save-dir", "raw_text/out"], "--save-dir", 2),
        (["--data-folder", "made", "--save-dir", "made"], "is a dataset", 2),
        (["--data-folder", "raw_text", "--save-dir", "binary"], "not made by this stage", 2),
        (["--data-folder", "raw_text", "--fields", "a,,b"], "commas", 2),
        (["--validation-percent", "100"], "percentage", 2),
        (["--max-error-rate", "5"], "fraction", 2),
        (["--min-chars", "many"], "whole number", 2),
        (["--fallback-encoding", "idna"], "unknown text encoding 'idna'", 2),
        (["--strings", "both"], "invalid choice", 2),
    ],
)
def test_bad_usage_is_reported(stage, raw, tmp_path, arguments, words, code):
    (tmp_path / "bare").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/a").write_bytes(b"\0")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/manifest.json").write_text('{"kind": "dataset/1"}')
    done = stage(SCRIPT, *arguments, expect=code)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf_datasets/corpus").exists()


def test_symbolic_links_of_stage_01_are_followed(stage, raw, tmp_path):
    stage("01_organize_data.py", "--num-dirs", 1, "--mode", "symlink")
    stage(SCRIPT)
    assert len(load_dataset(tmp_path / "hf_datasets/corpus")) == 6
    raw.rename(tmp_path / "gone")
    assert "missing" in stage(SCRIPT, expect=3).stderr


def test_a_full_disk_is_reported_before_anything_is_written(stage, raw, tmp_path):
    with (raw / "huge.txt").open("wb") as file:
        file.write(b"text")
        file.truncate(shutil.disk_usage(tmp_path).free)  # sparse: takes no room
    done = stage(SCRIPT, "--data-folder", raw, "--save-dir", "out", expect=4)
    assert "not enough room" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["raw_text"]


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_with_code_4_and_the_next_run_continues(stage, tmp_path):
    mixed(tmp_path / "data", 200)
    limited = (
        f"ulimit -f 500; exec {sys.executable} {ROOT / SCRIPT} --data-folder data "
        "--save-dir out --no-progress"
    )
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 4, done.stderr
    assert "no room to write" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    stage(SCRIPT, "--data-folder", "data", "--save-dir", "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


@pytest.mark.parametrize("way", ["shrinks", "grows", "is written to", "goes"])
def test_a_file_that_changes_after_it_was_listed_stops_the_build(
    tmp_path: Path, monkeypatch, way: str
) -> None:
    """The identity of the dataset names the earlier content."""
    folder = tmp_path / "raw"
    target = tmp_path / "out"
    line = '{"t": "text"}\n'
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(line * 100)
    changes = {
        "shrinks": lambda path: path.write_text(line * 10),
        "goes": Path.unlink,
        "grows": lambda path: path.write_text(line * 101),
        "is written to": lambda path: path.write_text(line * 100),
    }
    listed = work_units.cut_splits

    def disturbed(*arguments: object) -> list:
        units = listed(*arguments)
        changes[way](folder / "b.jsonl")
        return units

    monkeypatch.setattr(work_units, "cut_splits", disturbed)
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    stage = runpy.run_path(str(ROOT / SCRIPT))
    arguments = ["--data-folder", str(folder), "--save-dir", str(target), "--num-workers", "1"]
    with pytest.raises(UsageError, match=r"b\.jsonl changed") as caught:
        stage["main"](arguments)
    keyword = {
        "shrinks": "140",
        "grows": "1,414",
        "is written to": "modification time",
        "goes": "no longer",
    }
    assert keyword[way] in caught.value.found
    assert not target.exists()
    monkeypatch.undo()
    stage["main"](arguments)
    rows = {"shrinks": 110, "grows": 201, "is written to": 200, "goes": 100}
    assert len(load_dataset(target)) == rows[way] and [
        path.name for path in tmp_path.glob("out*")
    ] == ["out"]


def test_parts_of_a_file_that_changes_are_not_kept(tmp_path: Path) -> None:
    """The unit gets no record, so the next run reads it again."""
    (tmp_path / "a.txt").write_text("text")
    files, _ = inputs.find_inputs(tmp_path, False)
    [unit] = work_units.cut_files(tmp_path, files, tmp_path / "parts", RowOptions())
    (tmp_path / "a.txt").write_text("tex")
    path, change = split_parts.process_unit(unit).changed
    assert path == "a.txt" and "4 bytes" in change
    assert not list((tmp_path / "parts").glob("*.json"))
