# covers: 02_build_hf_dataset.py, lib/corpus/shards.py, lib/corpus/split_shards.py
# covers: lib/corpus/dataset.py, lib/corpus/work_units.py
"""Kill and resume stage 02, on several machines and with any number of workers."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lib.core import publish
from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, shards, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.corpus.tally import Tally
from tests.conftest import stage_command
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
OPTIONS = ("--validation-percent", 10, "--keep-source", "--dedup", "exact", "--min-chars", 3)


def write_files(root: Path, files: int) -> None:
    """Write files of several formats with repeated and short documents and bad lines."""
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["alpha", "beta", "gamma", "δέλτα"], k=draw.randint(1, 300)))
        for _ in range(files)
    ]
    root.mkdir()
    for number in range(files):
        some = draw.choices(texts, k=20)
        if number % 3:
            path = root / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"t": text}) + "\n" for text in some) + 'bad\n"x"')
        else:
            (root / f"{number}.md").write_text(some[0])


@pytest.fixture
def splits(stage, tmp_path: Path) -> Path:
    write_files(tmp_path / "raw_text", 90)
    stage("01_organize_data.py", "--num-dirs", 4)
    return tmp_path / "splits"


@pytest.mark.slow
def test_several_machines_and_any_workers_give_the_same_bytes(stage, splits, tmp_path):
    stage(SCRIPT, *OPTIONS, "--save-dir", "one", "--num-workers", 1)
    one = read_dataset_files(tmp_path / "one")
    summary = json.loads((tmp_path / "one/manifest.json").read_text())["summary"]
    assert summary["duplicates"] > 100 and summary["short"] > 10
    stage(SCRIPT, *OPTIONS, "--save-dir", "three", "--num-workers", 3)
    assert read_dataset_files(tmp_path / "three") == one

    stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--only-splits", "2-3", "--num-workers", 2)
    stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--only-splits", 0)
    refused = stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--merge", expect=3)
    assert "split_01: not built" in refused.stderr and "split_02" not in refused.stderr
    assert "--only-splits 1" in refused.stderr and not (tmp_path / "many").exists()
    again = stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--only-splits", "0-1")
    assert "already done: " in again.stdout and "split_01:" in again.stdout
    done = stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == one and "removed many.parts" in done.stdout
    assert not list(tmp_path.glob("many.*"))
    assert "already done" in stage(SCRIPT, *OPTIONS, "--save-dir", "many").stdout


def test_stale_and_damaged_parts_are_named_and_refused(stage, splits, tmp_path):
    stage(SCRIPT, "--only-splits", "0-3", "--save-dir", "out")
    parts = tmp_path / "out.parts"
    refused = stage(SCRIPT, "--min-chars", 5, "--save-dir", "out", "--merge", expect=3)
    assert "split_00: --min-chars: 0 there, 5 now" in refused.stderr
    assert "--overwrite --only-splits 0,1,2,3" in refused.stderr
    victim = next((parts / "split_02").glob("*.train"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    damaged = stage(SCRIPT, "--save-dir", "out", "--merge", expect=3)
    assert victim.name in damaged.stderr and "Traceback" not in damaged.stderr
    record = next((parts / "split_02").glob("0*.json"))
    record.write_text(re.sub(r"\d", "7", record.read_text()))
    damaged = stage(SCRIPT, "--save-dir", "out", "--merge", expect=3)
    assert record.name in damaged.stderr and "Traceback" not in damaged.stderr
    shutil.rmtree(parts / "split_02")
    stage(SCRIPT, "--only-splits", "2", "--save-dir", "out")
    stage(SCRIPT, "--save-dir", "out", "--merge")
    stage(SCRIPT, "--save-dir", "one")
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "one")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only-splits", "0", "--merge"], "exclude each other"),
        (["--only-splits", "2,7-9"], "no split 7, 8, 9"),
        (["--only-splits", "3-1"], "increasing"),
        (["--only-splits", "a"], "numbers such as"),
        (["--only-splits", ""], "numbers such as"),
        (["--only-splits", "0", "--data-folder", "raw_text"], "needs the splits"),
        (["--merge", "--data-folder", "raw_text"], "--merge needs the splits"),
        (["--dedup", "fuzzy"], "invalid choice"),
    ],
)
def test_bad_usage_is_reported(stage, tmp_path, arguments, words):
    (tmp_path / "raw_text").mkdir()
    for name in "abc":
        (tmp_path / f"raw_text/{name}").write_text("text")
    stage("01_organize_data.py", "--num-dirs", 3)
    done = stage(SCRIPT, *arguments, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf_datasets").exists()


def build_dataset(folder: Path, out: Path, shape: RowOptions, units: int | None = None) -> Tally:
    """Build a dataset in this process and return its tally.

    units: number of units after which the build stops, as if killed; None for all.
    """
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir(exist_ok=True)
    with DatasetWriter(out, shape) as dataset:
        tasks = work_units.cut_files(folder, files, out / PARTS, shape)
        for task in tasks[dataset.units : units]:
            dataset.add(work_units.process_unit(task))
        if units is None:
            dataset.finish()
        elif dataset._unnoted:  # later content is ignored
            (out / "errors.jsonl").open("ab").write(b'{"path": "half a li')
    return dataset.tally


@pytest.mark.parametrize(
    "notes",
    [4_000, pytest.param(1, marks=pytest.mark.slow), pytest.param(1 << 40, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_a_build_stopped_after_any_unit_gives_the_same_bytes(tmp_path, monkeypatch, notes, dedup):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", notes)
    shape = RowOptions(validation_percent=20, keep_source=True, dedup=dedup)
    write_files(tmp_path / "raw", 40)
    build_dataset(tmp_path / "raw", tmp_path / "whole", shape)
    expected = read_dataset_files(tmp_path / "whole")
    assert len([name for name in expected if name.startswith("train/data-")]) > 3
    for stops in ([3], [1, 1, 7], [5, 12], [0]):
        for stop in stops:
            build_dataset(tmp_path / "raw", tmp_path / "out", shape, stop)
        build_dataset(tmp_path / "raw", tmp_path / "out", shape)
        assert read_dataset_files(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")


def test_a_build_stopped_while_shards_are_renamed_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)
    write_files(tmp_path / "raw", 40)
    build_dataset(tmp_path / "raw", tmp_path / "whole", RowOptions())
    verify = shards._verify_shard
    calls = []

    def stop(path: Path, shard: shards.Shard) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        verify(path, shard)

    monkeypatch.setattr(shards, "_verify_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions())
    monkeypatch.setattr(work_units, "process_unit", lambda unit: pytest.fail("read again"))
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions())
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


def test_a_progress_record_of_lost_bytes_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 20_000)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)
    write_files(tmp_path / "raw", 20)
    build_dataset(tmp_path / "raw", tmp_path / "whole", RowOptions())
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(), 2)
    shard = tmp_path / "out/data-00000.unfinished"
    with shard.open("rb+") as file:
        file.truncate(100)
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(), 2)
    progress = tmp_path / "out/unfinished/progress.json"
    for old, new in (
        ('"units": 2', '"units": 1'),
        ('"tally": {', '"tally": {"x": 1, '),
        ("{", "["),
    ):
        text = progress.read_text()
        assert old in text
        progress.write_text(text.replace(old, new, 1) if old != "{" else "[]")
        build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(), 2)
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions())
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param((), marks=pytest.mark.long), ("--only-splits", "0-3")]
)
def test_a_build_killed_at_many_moments_gives_the_same_bytes(stage, tmp_path, options):
    write_files(tmp_path / "raw_text", 90)
    line = json.dumps({"t": "some text of a large file " * 20}) + "\n"
    # With --only-splits the build may end before it is killed.
    count, moments = (
        (45_000, (0.4, 0.8, 1.2, 1.6)) if options else (150_000, (0.3, 0.7, 1.0, 1.4, 2.2))
    )
    for name in "abcd":
        (tmp_path / f"raw_text/{name}.jsonl").write_text((line + "bad\n") * count)
    stage("01_organize_data.py", "--num-dirs", 4)
    stage(SCRIPT, "--save-dir", "whole")
    for seconds in moments:
        process = subprocess.Popen(
            stage_command(SCRIPT, "--save-dir", "out", *options),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out").exists()
    if options:
        stage(SCRIPT, "--save-dir", "out", *options)
    stage(SCRIPT, "--save-dir", "out", *(["--merge"] if options else []))
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")
    assert not list(tmp_path.glob("out.*"))


def test_parts_are_refused_as_a_dataset(stage, splits, tmp_path):
    stage(SCRIPT, "--only-splits", "0", "--save-dir", "out")
    with pytest.raises(publish.UsageError, match="not made by"):
        publish.is_done(tmp_path / "out.parts/split_00", "dataset/1", {}, False)
