# covers: 01_organize_data.py
"""Run stage 01 from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "01_organize_data.py"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Return raw_text/ with 23 files in nested directories, some with equal basenames."""
    root = tmp_path / "raw_text"
    for number in range(23):
        path = root / f"dir{number % 4}" / ("deep/" * (number % 2)) / f"file{number // 8}.txt"
        path = path if not path.exists() else path.with_name(f"other{number}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number} " * (number * number + 1))
    return root


def files_of(splits: Path) -> dict[str, str]:
    """Return {relative path inside the split: split}."""
    return {
        path.relative_to(splits).as_posix().partition("/")[2]: path.relative_to(splits).parts[0]
        for path in splits.glob("split_*/**/*")
        if not path.is_dir()
    }


def listed(splits: Path) -> dict[str, dict]:
    return {
        (entry := json.loads(line))["path"]: entry
        for line in (splits / "files.jsonl").read_text().splitlines()
    }


def snapshot(root: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.lstat().st_size,
        )
        for path in [root, *root.rglob("*")]
    }


def test_help_is_fast_and_names_every_option(stage):
    text = stage(SCRIPT, "--help", timeout=3, fresh=True).stdout
    for option in (
        "--src-dir",
        "--dst-root",
        "--num-dirs",
        "--mode",
        "--include",
        "--exclude",
        "--follow-symlinks",
        "--config",
        "--dry-run",
        "--overwrite",
        "--num-workers",
    ):
        assert option in text


def test_splits_are_balanced_keep_paths_and_are_hard_links(stage, raw, tmp_path):
    before = snapshot(raw)
    done = stage(SCRIPT, "--num-dirs", 5)
    splits = tmp_path / "splits"
    files = files_of(splits)
    expected = {path.relative_to(raw).as_posix() for path in raw.rglob("*") if path.is_file()}
    assert set(files) == expected
    assert sorted(Counter(files.values()).items()) == [
        ("split_00", 5),
        ("split_01", 5),
        ("split_02", 5),
        ("split_03", 4),
        ("split_04", 4),
    ] or sorted(Counter(files.values()).values()) == [4, 4, 5, 5, 5]
    sizes = Counter()
    for path, split in files.items():
        placed = splits / split / path
        assert placed.samefile(raw / path) and not placed.is_symlink()
        sizes[split] += placed.stat().st_size
        assert listed(splits)[path] == {
            "path": path,
            "bytes": placed.stat().st_size,
            "kind": "text",
            "split": split,
        }
    assert max(sizes.values()) < 1.1 * min(sizes.values())
    assert snapshot(raw) == before
    manifest = json.loads((splits / "manifest.json").read_text())
    assert manifest["kind"] == "splits/1" and manifest["summary"]["files"] == 23
    assert "02_build_hf_dataset.py --data-folder splits" in done.stdout
    assert "splits/files.jsonl" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"raw_text", "splits"}


@pytest.mark.parametrize("mode", ["symlink", "copy"])
def test_symlink_and_copy_modes_place_all_files(stage, raw, tmp_path, mode):
    os.utime(raw / "dir0/file0.txt", ns=(10**18, 10**18 + 7))
    stage(SCRIPT, "--num-dirs", 3, "--mode", mode)
    split = files_of(tmp_path / "splits")["dir0/file0.txt"]
    placed = tmp_path / "splits" / split / "dir0/file0.txt"
    assert placed.is_symlink() == (mode == "symlink")
    assert placed.read_bytes() == (raw / "dir0/file0.txt").read_bytes()
    if mode == "symlink":
        assert placed.readlink() == raw / "dir0/file0.txt"
    else:
        assert not placed.samefile(raw / "dir0/file0.txt")
        assert placed.stat().st_mtime_ns == 10**18 + 7


def test_a_second_run_is_done_refused_or_replaces(stage, raw, tmp_path):
    stage(SCRIPT, "--num-dirs", 3)
    before = snapshot(tmp_path / "splits")
    assert "already done" in stage(SCRIPT, "--num-dirs", 3, "--num-workers", 1).stdout
    moved = raw.rename(tmp_path / "moved")
    assert "already done" in stage(SCRIPT, "--num-dirs", 3, "--src-dir", moved).stdout

    refused = stage(SCRIPT, "--num-dirs", 4, "--src-dir", moved, expect=2)
    assert "--num-dirs: 3 there, 4 now" in refused.stderr and "--overwrite" in refused.stderr
    (moved / "new.txt").write_text("new")
    refused = stage(SCRIPT, "--num-dirs", 3, "--src-dir", moved, expect=2)
    assert "--src-dir: raw_text there" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert snapshot(tmp_path / "splits") == before

    # A failing --overwrite leaves the old splits as they are, a good one replaces them.
    stage(SCRIPT, "--src-dir", moved, "--include", "*.none", "--overwrite", expect=2)
    assert snapshot(tmp_path / "splits") == before
    stage(SCRIPT, "--num-dirs", 4, "--src-dir", moved, "--overwrite")
    assert "new.txt" in files_of(tmp_path / "splits")
    assert sorted(path.name for path in (tmp_path / "splits").iterdir()) == [
        "files.jsonl",
        "manifest.json",
        "split_00",
        "split_01",
        "split_02",
        "split_03",
    ]


def test_dry_run_leaves_nothing(stage, raw, tmp_path):
    before = snapshot(tmp_path)
    done = stage(SCRIPT, "--dry-run")
    assert "23 files" in done.stdout and "20, each with 1 or 2 files" in done.stdout
    assert snapshot(tmp_path) == before


def test_hostile_trees_are_organised_or_skipped(stage, tmp_path):
    root = tmp_path / "raw_text"
    root.mkdir()
    names = [
        b"new\nline.txt",
        b"caf\xe9.txt",
        "日本語.md".encode(),
        b"-rf",
        b"a b'\"\\.txt",
        b"x" * 200 + b".txt",
    ]
    for name in names:
        (root / os.fsdecode(name)).write_bytes(b"text of " + name)
    (root / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "empty").touch()
    (root / ".hidden").write_text("x")
    (root / "gone").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    (root / "outside").symlink_to("/etc/hostname")
    (root / "data.jsonl.gz").write_bytes(b"\x1f\x8b\x08rest")
    os.mkfifo(root / "pipe")
    stage(SCRIPT, "--num-dirs", 2, timeout=20)
    entries = listed(tmp_path / "splits")
    taken = {os.fsencode(path) for path, entry in entries.items() if "split" in entry}
    assert taken == {*names, b"data.jsonl.gz"}
    assert entries["data.jsonl.gz"]["kind"] == "gzip"
    assert {path: entry["skipped"] for path, entry in entries.items() if "skipped" in entry} == {
        "image.png": "binary",
        "empty": "empty",
        ".hidden": "hidden",
        "gone": "link dangles",
        "loop": "link inside the source",
        "outside": "link leads outside",
        "pipe": "special",
    }
    for path, entry in entries.items():
        if "split" in entry:
            assert (tmp_path / "splits" / entry["split"] / path).is_file()

    stage(SCRIPT, "--num-dirs", 2, "--follow-symlinks", "--dst-root", "followed", timeout=20)
    entries = listed(tmp_path / "followed")
    assert "split" in entries["outside"] and entries["loop/"]["skipped"] == "link loops"
    placed = tmp_path / "followed" / entries["outside"]["split"] / "outside"
    assert not placed.is_symlink() and placed.read_bytes() == Path("/etc/hostname").read_bytes()


def test_hard_links_to_another_file_system_become_copies(stage, raw, tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    target = other / f"pipeline-test-{os.getpid()}" / "splits"
    try:
        done = stage(SCRIPT, "--dst-root", target, "--num-dirs", 2)
        assert "hard links" in done.stdout and "23 by copy" in done.stdout
        assert len(files_of(target)) == 23
    finally:
        subprocess.run(["rm", "-r", str(target.parent)], check=True)


def test_the_destination_may_be_inside_the_source(stage, raw):
    for _ in range(2):
        stage(SCRIPT, "--dst-root", raw / "splits", "--num-dirs", 2)
    assert len(files_of(raw / "splits")) == 23


def test_earlier_splits_in_the_source_are_not_taken_again(stage, raw, tmp_path):
    stage(SCRIPT, "--dst-root", raw / "earlier")
    stage(SCRIPT, "--dst-root", tmp_path / "again")
    assert listed(tmp_path / "again")["earlier/"]["skipped"] == "output of this stage"
    assert len(files_of(tmp_path / "again")) == 23


def test_fewer_files_than_splits_give_fewer_splits(stage, raw, tmp_path):
    done = stage(SCRIPT, "--num-dirs", 100)
    assert "only 23 splits" in done.stdout
    assert set(Counter(files_of(tmp_path / "splits").values()).values()) == {1}
    stage(SCRIPT, "--num-dirs", 1000, "--overwrite", "--include", "dir0/*")


def test_include_and_exclude_may_be_repeated(stage, raw, tmp_path):
    done = stage(
        SCRIPT,
        "--num_dirs",
        1,
        "--include",
        "dir0/*",
        "--include",
        "dir1/*",
        "--exclude",
        "deep",
        "--exclude",
        "depe",
    )
    paths = set(files_of(tmp_path / "splits"))
    assert paths and all(path.startswith("dir0/") for path in paths)
    assert "--include dir1/* matches none" in done.stdout
    assert "--exclude depe matches nothing" in done.stdout and "--exclude deep" not in done.stdout
    assert "dir0/* matches" not in done.stdout
    (tmp_path / "run.yaml").write_text(
        "include: ['dir0/*', 'dir1/*']\nexclude: [deep, depe]\nnum_dirs: 1"
    )
    assert "already done" in stage(SCRIPT, "--config", "run.yaml").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--src-dir", "nowhere"], "does not exist"),
        (["--src-dir", "file"], "is a file"),
        (["--src-dir", "bare"], "an empty directory"),
        (["--src-dir", "blank"], "1 empty"),
        (["--src-dir", "binary"], "1 binary"),
        (["--dst-root", "raw_text"], "contains --src-dir"),
        (["--dst-root", "."], "contains --src-dir"),
        (["--dst-root", "blank"], "not made by"),
        (["--num-dirs", "0"], "above 0"),
        (["--mode", "move"], "invalid choice"),
        (["--sorce-dir", "x"], "--src-dir"),
    ],
)
def test_bad_usage_is_reported(stage, raw, tmp_path, arguments, words):
    for name in ("bare", "blank", "binary"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "blank/empty").touch()
    (tmp_path / "binary/a").write_bytes(b"\0")
    before = snapshot(tmp_path)
    done = stage(SCRIPT, *arguments, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_killed_run_leaves_no_splits_and_the_next_one_cleans_up(stage, raw, tmp_path):
    for number in range(3000):
        (raw / f"more{number}.txt").write_text("x")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / SCRIPT), "--mode", "copy"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None and not list(tmp_path.glob("splits.partial-*/content-*/split_00")):
        pass
    process.kill()
    process.wait()
    assert not (tmp_path / "splits").exists()
    assert list(tmp_path.glob("splits.partial-*"))
    stage("02_build_hf_dataset.py", expect=3)
    done = stage(SCRIPT, "--mode", "copy")
    assert "did not finish" in done.stdout
    assert len(files_of(tmp_path / "splits")) == 3023
    assert {path.name for path in tmp_path.iterdir()} == {"raw_text", "splits"}


def test_files_deleted_from_finished_splits_are_noticed(stage, raw, tmp_path):
    stage(SCRIPT, "--num-dirs", 3)
    splits = files_of(tmp_path / "splits")
    gone = [path for path, split in splits.items() if split == "split_01"][:2]
    for path in gone:
        (tmp_path / "splits/split_01" / path).unlink()
    damaged = stage(SCRIPT, "--num-dirs", 3, expect=3)
    count = list(splits.values()).count("split_01")
    assert f"split_01 contains {count - 2} files" in damaged.stderr
    assert "split_00" not in damaged.stderr and "--overwrite" in damaged.stderr
    assert "Traceback" not in damaged.stderr
    subprocess.run(["rm", "-r", str(tmp_path / "splits/split_02")], check=True)
    damaged = stage(SCRIPT, "--num-dirs", 3, expect=3)
    assert "split_01" in damaged.stderr and "split_02 contains 0 files" in damaged.stderr
    stage(SCRIPT, "--num-dirs", 3, "--overwrite")
    assert files_of(tmp_path / "splits") == splits


def test_thousands_of_files_are_placed_by_several_processes(stage, tmp_path):
    for number in range(1500):
        name = os.fsdecode(b"caf\xe9") if number % 3 else "\n"  # no UTF-8, a line break
        path = tmp_path / "raw_text" / f"{number % 7}/{number % 3}/{name}{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * (number % 50 + 1) if number % 10 else "\0")
    for workers in (1, 3):
        stage(SCRIPT, "--num-dirs", 4, "--num-workers", workers, "--dst-root", f"by{workers}")
    assert (entries := listed(tmp_path / "by1")) == listed(tmp_path / "by3")
    assert sum(os.fsencode(path).rpartition(b"/")[2][:4] == b"caf\xe9" for path in entries) == 1000
    assert files_of(tmp_path / "by1") == files_of(tmp_path / "by3")
    assert len(files_of(tmp_path / "by3")) == 1350
    assert Counter(entry.get("skipped") for entry in listed(tmp_path / "by3").values()) == {
        None: 1350,
        "binary": 150,
    }
