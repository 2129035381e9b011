# covers: lib/corpus/row_batch.py, lib/corpus/dropped.py, lib/corpus/selection.py
"""Rules and columns see rows in batches, and what is written does not depend on the batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lib.corpus import inputs, selection, work_units
from lib.corpus.dataset import DatasetWriter
from lib.corpus.row_batch import RowBatch
from lib.corpus.row_options import RowOptions
from lib.corpus.selection import BatchRule, Column, RowVerdict, RuleGroup
from lib.curate import shingles

# --fields switches the rules of this test on; it has no other effect on plain text.
OPTIONS = RowOptions(min_chars=3, fields=["text"], keep_source=True)


def count_letters(batch: RowBatch) -> list[int]:
    return batch.memo(
        "letters", lambda row_batch: [sum(map(str.isalpha, t)) for t in row_batch.texts]
    )


def find_loud(batch: RowBatch) -> RowVerdict:
    shares = [sum(map(str.isupper, text)) / len(text) for text in batch.texts]
    return RowVerdict(np.array(shares) > 0.5, shares)


def find_numbers(batch: RowBatch) -> RowVerdict:
    return RowVerdict(np.array([count < 4 for count in batch.columns["letters"]]))


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        selection.RULE_GROUPS,
        "style",
        RuleGroup(
            "fields",
            lambda _: ["style: loud", "style: numbers"],
            lambda _: [
                BatchRule("style: loud", "mostly capital letters", find_loud),
                BatchRule("style: numbers", "without words", find_numbers),
            ],
        ),
    )
    monkeypatch.setitem(
        selection.COLUMNS, "letters", Column("fields", "int", lambda _: count_letters)
    )


def build_dataset(folder: Path, out: Path) -> DatasetWriter:
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir()
    with DatasetWriter(out, OPTIONS) as dataset:
        for unit in work_units.cut_files(folder, files, out / "unfinished/parts", OPTIONS):
            dataset.add(work_units.process_unit(unit))
        dataset.finish()
    return dataset


def make_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").write_text("A QUIET ROW")
    (folder / "b.jsonl").write_text(
        "\n".join(
            json.dumps({"text": text})
            for text in ("one row", "1234567", "QUITE LOUD", "x", "A 1", "another row")
        )
        + "\n{broken\n"
    )
    (folder / "c.txt").write_bytes(b"caf\xff in bytes")
    (folder / "d.txt").write_text("   ")
    (folder / "e.txt").write_text("the end")


@pytest.mark.parametrize("characters", [1 << 19, 12, 1])
def test_every_batch_gives_the_same_dataset(tmp_path, monkeypatch, rules, characters):
    make_files(tmp_path / "raw")
    monkeypatch.setattr(shingles, "BATCH_CHARACTERS", characters)
    dataset = build_dataset(tmp_path / "raw", tmp_path / "out")
    with pa.ipc.open_stream((tmp_path / "out/data-00000-of-00001.arrow").read_bytes()) as stream:
        rows = stream.read_all().to_pylist()
    assert [(row["text"], row["letters"]) for row in rows] == [
        ("one row", 6),
        ("another row", 10),
        ("caf� in bytes", 10),
        ("the end", 6),
    ]
    dropped = (tmp_path / "out/dropped.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in dropped] == [
        ("a.txt", 1, "style: loud", 0.8182, None),
        ("b.jsonl", 2, "style: numbers", None, None),
        ("b.jsonl", 3, "style: loud", 0.9, None),
        ("b.jsonl", 4, "short", 1, None),
        ("b.jsonl", 5, "style: numbers", None, None),
    ]
    summary = dataset.summary()
    assert summary["rules"] == {
        "short": {"dropped": 1, "alone": 1},
        "style: loud": {"dropped": 2, "alone": 2},
        "style: numbers": {"dropped": 2, "alone": 3},  # "x" is short too
    }
    problems = [json.loads(line) for line in (tmp_path / "out/errors.jsonl").open()]
    assert [(problem["path"], problem["kind"], problem["message"][:7]) for problem in problems] == [
        ("a.txt", "style: loud", "1 row i"),
        ("b.jsonl", "syntax", "not val"),
        ("b.jsonl", "style: numbers", "2 rows "),
        ("b.jsonl", "style: loud", "1 row i"),
        ("b.jsonl", "short", "1 row i"),
        ("c.txt", "encoding", "invalid"),
        ("d.txt", "empty", "the fil"),
    ]


def test_what_several_rules_need_is_computed_once():
    batch = RowBatch([])
    computed = [batch.memo("words", lambda row_batch: object()) for _ in range(2)]
    assert computed[0] is computed[1]
