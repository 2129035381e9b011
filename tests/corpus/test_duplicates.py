# covers: lib/corpus/duplicates.py, lib/corpus/dropped.py, lib/corpus/report.py
"""dropped.jsonl lists each short row, and each row that equals an earlier one with that row."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.report import find_refusal
from lib.corpus.row_options import RowOptions
from lib.corpus.tally import Tally
from tests.training import read_dataset_files

OPTIONS = RowOptions(dedup="exact", min_chars=30, validation_percent=20)


def write_corpus(root: Path) -> dict[tuple[str, int], str]:
    """Write files in which many rows are short or repeated; return the rows by place."""
    draw = random.Random(0)
    rows = {}
    texts = [f"row {number} " * draw.randint(1, 90) for number in range(60)]
    root.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"):
        chosen = draw.choices(texts, k=60)
        (root / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
        rows |= {(name, position): text for position, text in enumerate(chosen, 1)}
    return rows


def test_a_duplicate_names_the_kept_row_also_after_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw"
    texts = write_corpus(raw)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)  # note the progress after each unit
    monkeypatch.setattr(work_units, "UNIT_BYTES", 8_000)  # so each file is several units
    files, _ = inputs.find_inputs(raw, False)

    def build(out: Path, stop: int | None = None) -> DatasetWriter:
        out.mkdir(exist_ok=True)
        with DatasetWriter(out, OPTIONS) as dataset:
            units = work_units.cut_files(raw, files, out / PARTS, OPTIONS)
            assert len(units) > 4
            for unit in units[dataset.units : stop]:
                dataset.add(work_units.process_unit(unit))
            if stop is None:
                dataset.finish()
        return dataset

    dataset = build(tmp_path / "whole")
    for stop in (1, 3):
        build(tmp_path / "stopped", stop)
    resumed = build(tmp_path / "stopped")
    assert read_dataset_files(tmp_path / "stopped") == read_dataset_files(tmp_path / "whole")
    assert resumed.summary() == dataset.summary()

    lines = [json.loads(x) for x in (tmp_path / "whole/dropped.jsonl").read_text().splitlines()]
    dropped = {(line["path"], line["position"]): line for line in lines}
    short = {place for place, text in texts.items() if len(text) < 30}
    assert {place for place, line in dropped.items() if line["rule"] == "short"} == short
    assert all(dropped[place]["value"] == len(texts[place]) for place in short)
    copies = [line for line in lines if line["rule"] == "duplicate"]
    assert len(copies) == dataset.duplicates > 10 and dataset.tally.short == len(short)
    for line in copies:
        kept_row = line["duplicate_of"]
        assert (
            texts[line["path"], line["position"]] == texts[kept_row["path"], kept_row["position"]]
        )
        assert (kept_row["path"], kept_row["position"]) not in dropped


def test_a_dataset_without_rows_is_refused_with_the_options_that_dropped_them() -> None:
    options = RowOptions(min_chars=9, dedup="exact")
    empty = SimpleNamespace(tally=Tally(short=2), duplicates=3, rows={"train": 0})
    error = find_refusal(empty, options, Path("raw"), 1, 1.0)  # type: ignore[arg-type]
    assert error and "no row is left" in error.problem and "5 rows" in error.problem
    assert "3 rows dropped by --dedup exact" in error.found and "2 rows" in error.found


def test_a_tally_of_an_earlier_version_is_read() -> None:
    values = Tally(documents=7).to_json() | {"dropped": {"short": 3, "language": 1}, "alone": {}}
    del values["short"]
    tally = Tally.from_json(values)
    assert tally.short == 3 and tally.documents == 7
