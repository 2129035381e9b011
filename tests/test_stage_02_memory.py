# covers: 02_build_hf_dataset.py, lib/corpus/raw_file.py, lib/corpus/pool.py
"""The memory of stage 02 does not depend on the size of the input or of a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import stage_command
from tests.process_tree import measure_peak

SCRIPT = "02_build_hf_dataset.py"
GIGABYTE = 1_000_000_000
MEGABYTE = 1_000_000


def peak_of_run(folder: Path, *options: object) -> int:
    """Run stage 02 and return the largest sum of resident memory of its processes, in bytes."""
    options = ("--save-dir", f"out/{folder.name}", "--num-workers", 2, *options)
    command = stage_command(SCRIPT, "--data-folder", folder.name, *options)
    return measure_peak(command, folder.parent)


def lines(path: Path, megabytes: int) -> None:
    line = json.dumps({"t": "some words of a document " * 60, "n": [1, {"a": "b"}]}) + "\n"
    path.parent.mkdir()
    with path.open("w") as file:
        for _ in range(megabytes):
            file.write(line * (MEGABYTE // len(line)))


@pytest.mark.slow
def test_sixteen_times_the_input_takes_no_more_memory(tmp_path):
    peaks = {}
    for times in (1, 16):
        lines(tmp_path / f"x{times}/a.jsonl", 30 * times)
        peaks[times] = peak_of_run(tmp_path / f"x{times}", "--dedup", "exact")
    assert max(peaks.values()) < GIGABYTE, peaks
    assert peaks[16] < 1.5 * peaks[1], peaks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "problems"),
    [
        ("a.txt", 1, []),
        ("a.jsonl", 1, ["too large"]),
        ("a.json", 0, ["too large"]),
        pytest.param("a.csv", 0, ["too large"], marks=pytest.mark.long),
        pytest.param("a.yaml", 0, ["too large"], marks=pytest.mark.long),
    ],
)
def test_a_line_of_a_gigabyte_takes_little_memory(tmp_path, name, rows, problems):
    path = tmp_path / "data" / name
    path.parent.mkdir()
    with path.open("w") as file:
        if name != "a.txt":
            file.write('{"a": "' if "json" in name else 'a: "')
        for _ in range(1200):
            file.write("some text " * (MEGABYTE // 10))
        file.write('"}\n"after"\n' if "json" in name else '"\n')
    (tmp_path / "data/b.txt").write_text("b")
    assert peak_of_run(tmp_path / "data") < GIGABYTE
    out = tmp_path / "out/data"
    kinds = [json.loads(line)["kind"] for line in (out / "errors.jsonl").read_text().splitlines()]
    assert kinds[: len(problems)] == problems
    assert json.loads((out / "manifest.json").read_text())["summary"]["rows"] >= rows + 1


@pytest.mark.slow
def test_a_json_list_of_a_gigabyte_takes_little_memory(tmp_path):
    lines(tmp_path / "data/a.jsonl", 600)
    source = tmp_path / "data/a.jsonl"
    with source.open("rb") as file, (tmp_path / "data/a.json").open("wb") as target:
        target.write(b"[")
        for number, line in enumerate(file):
            target.write(b",\n" + line if number else line)
        target.write(b"]")
    source.unlink()
    assert peak_of_run(tmp_path / "data") < GIGABYTE
    assert (tmp_path / "out/data/errors.jsonl").read_text() == ""
