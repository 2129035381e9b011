# covers: lib/curate/page/collect.py, lib/corpus/unit_rows.py, lib/corpus/dropped.py
# covers: lib/curate/sample_dropped.py
"""What stage 02 reports about dropped rows: report.html, dropped.jsonl and --sample-dropped."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.report import find_refusal
from lib.corpus.row_options import RowOptions
from lib.corpus.tally import Tally
from lib.corpus.work_units import FileSpan, WorkUnit
from lib.curate.sample_dropped import SAMPLE_BYTES, choose_units
from tests.pages.test_svg import HOSTILE, check_page
from tests.test_stage_02_near import change_words, make_words, write_lines
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
OPTIONS = ("--dedup", "near", "--min-chars", 30, "--validation-percent", 10, "--mask", "email")


def write_corpus(root: Path) -> None:
    """Write two sources; most rows of one are similar or short, some with hostile texts."""
    draw = random.Random(0)
    bases = [make_words(draw, 80) for _ in range(12)]
    copies = [
        f"{HOSTILE}\0 " + " ".join(change_words(draw, base, draw.choice([0, 0, 1, 2])))
        for base in bases
        for _ in range(draw.randint(1, 9))
    ]
    draw.shuffle(copies)
    for number in range(4):
        short = [f"{HOSTILE[:20]}{number}", "", "short", "t@firma-berg.de"]
        write_lines(root / f"mirror/{number}.jsonl", copies[number::4] + short)
        write_lines(root / f"own/{number}.jsonl", [" ".join(make_words(draw, 50))] * 2 + short)
    (root / "top.txt").write_text("a file in no directory, written by anna@firma-berg.de")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "raw")
    return tmp_path / "raw"


@pytest.mark.slow
def test_the_report_is_the_same_for_any_workers_and_after_a_merge(stage, raw, tmp_path):
    stage("01_organize_data.py", "--src-dir", "raw", "--num-dirs", 3)
    stage(SCRIPT, "--save-dir", "one", *OPTIONS)
    one = read_dataset_files(tmp_path / "one")
    for workers in (2, 3):
        stage(SCRIPT, "--save-dir", "many", *OPTIONS, "--num-workers", workers, "--overwrite")
        assert read_dataset_files(tmp_path / "many") == one
    for numbers in ("0,2", "1"):
        stage(SCRIPT, "--save-dir", "merged", *OPTIONS, "--only-splits", numbers)
    stage(SCRIPT, "--save-dir", "merged", *OPTIONS, "--merge")
    assert read_dataset_files(tmp_path / "merged") == one


def test_a_dataset_has_a_report_and_lists_all_dropped_rows(stage, raw, tmp_path):
    printed = stage(SCRIPT, "--data-folder", raw, "--save-dir", "one", *OPTIONS).stdout
    one = read_dataset_files(tmp_path / "one")
    page = check_page(one["report.html"].decode())
    assert str(tmp_path) not in page.text
    assert "email\n1\n(no directory) 1\na…@f….de" in page.text
    assert "<email>" in page.text and "firma-berg" not in page.text
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())
    summary = manifest["summary"]
    assert "report.html" in {entry["path"] for entry in manifest["files"]}
    for name in ("short", "duplicates", "near_duplicates"):
        assert summary[name] > 0
    for text in (
        f"The dataset contains {summary['rows']:,} rows",
        "mirror lost",
        "Samples of dropped rows",
        "<script>alert(1)</script>\\u202e",
        "(no directory)",
        "--min-chars\n30",
    ):
        assert text in page.text, text
    assert "lost over half   mirror (" in printed and "one/report.html" in printed
    assert summary["near"]["recall"][-1]["pairs"] > 0

    lines = [json.loads(line) for line in one["dropped.jsonl"].splitlines()]
    assert len(lines) == sum(summary[name] for name in ("short", "duplicates", "near_duplicates"))
    short = [line for line in lines if line["rule"] == "short"]
    assert len(short) == summary["short"] and all(line["value"] < 30 for line in short)


def test_exact_duplicates_name_the_kept_row_also_after_kills(raw, tmp_path, monkeypatch):
    (raw / "own/0b.jsonl").write_bytes((raw / "own/0.jsonl").read_bytes())
    shape = RowOptions(dedup="exact", min_chars=30, validation_percent=20)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)  # note the progress after each unit
    monkeypatch.setattr(work_units, "UNIT_BYTES", 40_000)  # of a few files each
    files, _ = inputs.find_inputs(raw, False)

    def build(out: Path, stop: int | None = None) -> None:
        out.mkdir(exist_ok=True)
        with DatasetWriter(out, shape) as dataset:
            units = work_units.cut_files(raw, files, out / PARTS, shape)
            assert len(units) > 3
            for unit in units[dataset.units : stop]:
                dataset.add(work_units.process_unit(unit))
            if stop is None:
                dataset.finish()
                tallies.append(dataset.tally)

    tallies: list = []
    build(tmp_path / "whole")
    for stop in (1, 3):
        build(tmp_path / "stopped", stop)
    build(tmp_path / "stopped")
    assert read_dataset_files(tmp_path / "stopped") == read_dataset_files(tmp_path / "whole")
    assert tallies[0].row_counts == tallies[1].row_counts

    texts = {}
    for path in raw.rglob("*.jsonl"):
        name = path.relative_to(raw).as_posix()
        rows = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for position, text in enumerate(filter(None, rows), 1):  # an empty one is no row
            texts[name, position] = text
    lines = [json.loads(x) for x in (tmp_path / "whole/dropped.jsonl").read_text().splitlines()]
    copies = [line for line in lines if line["rule"] == "duplicate"]
    assert len(copies) > 10
    dropped = {(line["path"], line["position"]) for line in lines}
    for line in copies:
        original = line["duplicate_of"]
        assert (
            texts[line["path"], line["position"]] == texts[original["path"], original["position"]]
        )
        assert (original["path"], original["position"]) not in dropped
    samples = tallies[0].row_counts.samples["duplicate"]
    assert len(samples) == 10 and all(", row " in sample.kept for sample in samples)


def test_conversations_are_counted_by_the_bytes_of_their_turns(stage, tmp_path):
    turns = [{"role": "user", "content": "Hällo"}, {"role": "assistant", "content": "x" * 300}]
    rows = [{"messages": turns}] * 3 + [{"messages": turns * 2}]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--data-folder", "raw", "--save-dir", "out", "--format", "chat", "--dedup", "exact")
    stage(SCRIPT, *options)
    page = check_page((tmp_path / "out/report.html").read_text())
    assert "conversations\n4" in page.text
    assert "Hällo\nxxxx" in page.text  # the sample of a duplicate
    assert "duplicate\n--dedup exact\n2\n50.0 %" in page.text
    assert "duplicates a.jsonl, row 1" in page.text
    assert "text read\n1.5 kB" in page.text  # 3 · 306 + 2 · 306 bytes


def test_a_dataset_without_rows_is_refused_with_the_options_that_dropped_them():
    options = RowOptions(min_chars=9, dedup="near")
    tally = Tally(dropped=Counter(short=2))
    empty = SimpleNamespace(tally=tally, dropped=Counter(near_duplicates=3), rows={"train": 0})
    error = find_refusal(empty, options, Path("raw"), 1, 1.0)
    assert error and "no row is left for the split `train`" in error.problem
    assert error.problem.endswith("dropped 5 rows")
    assert "3 rows dropped by --dedup near" in error.found and "2 rows" in error.found


def test_sample_dropped_prints_examples_and_writes_nothing(stage, raw, tmp_path):
    options = (
        SCRIPT,
        "--data-folder",
        raw,
        "--dedup",
        "near",
        "--save-dir",
        "out",
        "--dry-run",
        "--sample-dropped",
        20,
    )
    before = sorted(tmp_path.rglob("*"))
    one = stage(*options, "--min-chars", 30).stdout
    assert one == stage(*options, "--min-chars", 30, "--num-workers", 2).stdout.replace(
        "by 2 workers", "by 1 worker"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert "a sample cannot show what --dedup drops" in one
    assert one.count("(5)\n      short") >= 3
    assert "      </svg><script>alert" in one and "\x1b" not in one and "\u202e" not in one
    none = stage(*options).stdout
    assert "no rule is on" in none
    refused = stage(SCRIPT, "--data-folder", raw, "--merge", "--sample-dropped", 1, expect=2).stderr
    assert "--sample-dropped and --merge exclude each other" in refused


def test_the_sample_is_spread_over_the_input_and_bounded():
    def make_unit(number: int, size: int) -> WorkUnit:
        file = inputs.InputFile(f"{number}", f"{number}", size, 0)
        return WorkUnit(number, (FileSpan(file, size),), "", "", RowOptions())

    small = [make_unit(number, 16_000_000) for number in range(1000)]
    assert [unit.number for unit in choose_units(small)] == [125, 375, 625, 875]
    assert [unit.number for unit in choose_units(small[:2])] == [0, 1]
    huge = [make_unit(number, 40_000_000) for number in range(8)]
    assert sum(unit.bytes for unit in choose_units(huge)) <= SAMPLE_BYTES
    assert choose_units([make_unit(0, SAMPLE_BYTES + 1)]) == []
