# covers: lib/curate/rows.py, lib/curate/first_pass.py
"""Steps see rows in batches, and what is recorded does not depend on the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.curate import reader, step
from lib.curate.first_pass import UnitJudge
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, StepResult
from lib.curate.unit_files import KEPT, UnitTask
from tests.curate.curations import write_texts

TEXTS = [
    "one row",
    "1234567",
    "QUITE LOUD",
    "x",
    "A 1",
    "another row",
    "caf\xe9 in bytes",
    "the end",
]


def count_letters(batch: RowBatch) -> list[int]:
    return [sum(map(str.isalpha, text)) for text in batch.texts]


class Loud(CurationStep):
    """Adds a column, and drops rows with many capital letters."""

    name = "loud"

    def list_rules(self) -> dict[str, str]:
        return {"loud": "--loud"}

    def list_columns(self) -> dict[str, str]:
        return {"letters": "int"}

    def start(self) -> Loud:
        return self

    def run(self, batch: RowBatch) -> StepResult:
        shares = [sum(map(str.isupper, text)) / len(text) for text in batch.texts]
        letters = batch.memo("letters", count_letters)
        dropped = np.array(shares) > 0.5
        return StepResult([RuleVerdict("loud", dropped, shares)], {"letters": letters})

    def count(self) -> Counts:
        return {"seen": True}


class Numbers(Loud):
    """Drops rows with few letters, by the column of the other step and one of the input."""

    name = "numbers"

    def list_rules(self) -> dict[str, str]:
        return {"numbers": "--numbers"}

    def list_inputs(self) -> list[str]:
        return ["least"]

    def list_columns(self) -> dict[str, str]:
        return {}

    def run(self, batch: RowBatch) -> StepResult:
        letters = np.array(batch.columns["letters"])
        dropped = letters < np.array(batch.columns["least"])
        return StepResult([RuleVerdict("numbers", dropped)], sidecars={"letters": letters})


@pytest.mark.parametrize("characters", [1 << 19, 12, 1])
def test_every_batch_gives_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    monkeypatch.setattr(reader, "BATCH_CHARACTERS", characters)
    source = reader.open_source(write_texts(tmp_path / "in", TEXTS, least=[4] * len(TEXTS)))
    steps: list[Any] = [Loud(), Numbers()]
    (unit,) = source.units
    record = UnitJudge(steps)(UnitTask(unit, tmp_path))
    arrays = record.read_arrays()
    assert [*step.list_rules(steps)] == ["loud", "numbers"]
    assert arrays["fates"].tolist() == [KEPT, 2, 1, 2, 2, KEPT, KEPT, KEPT]
    letters = [6, 0, 9, 1, 1, 10, 11, 6]
    assert arrays["letters"].tolist() == letters
    columns = record.read_columns()
    assert columns and columns.to_pydict() == {"letters": letters}
    assert record.read_drops() == {1: None, 2: 0.9, 3: None, 4: None}
    assert record.alone == {"loud": 1, "numbers": 3}
    assert record.counts == {"loud": {"seen": True}, "numbers": {"seen": True}}


def test_what_several_steps_need_is_computed_once() -> None:
    batch = RowBatch([], {})
    computed = [batch.memo("words", lambda row_batch: object()) for _ in range(2)]
    assert computed[0] is computed[1]
