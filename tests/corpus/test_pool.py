# covers: lib/corpus/pool.py, lib/corpus/split_parts.py
"""A file that crashes its worker is found, and no other file of its unit is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.core import workers
from lib.core.errors import UsageError
from lib.core.workers import WorkerDied
from lib.corpus import inputs, pool, split_parts, work_units
from lib.corpus.pool import ProcessUnit, UnitPool
from lib.corpus.row_options import RowOptions
from lib.corpus.work_units import UnitResult, WorkUnit

FATAL = "b.txt"


class CrashingPool:
    """Processes units in this process; a unit that reads FATAL crashes its worker."""

    def __init__(self, count: int, name: str, prepare: Any, process: ProcessUnit, **_: Any) -> None:
        self._process = process

    def run(self, units: Any, on_death: Any) -> Iterator[UnitResult]:
        return map(on_death, units)

    def answer(self, unit: WorkUnit) -> UnitResult:
        if FATAL in {span.file.path for span in unit.spans} - unit.avoid:
            raise WorkerDied("the worker has died")
        return self._process(unit)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("process", [work_units.process_unit, split_parts.process_unit])
def test_the_other_files_of_a_unit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: ProcessUnit
) -> None:
    monkeypatch.setattr(workers, "Pool", CrashingPool)
    monkeypatch.setattr(pool, "start_server", lambda: None)
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("a.txt", FATAL, "c.txt", "d.txt"):
        (folder / name).write_text(f"the text of {name}")
    files, _ = inputs.find_inputs(folder, False)
    [unit] = work_units.cut_files(folder, files, tmp_path / "parts", RowOptions())
    with UnitPool(1, process) as processes:
        [result] = processes.run([unit])
    assert result.rows == {"train": 3}
    assert result.tally.problems == {"crash": 1} and result.tally.failed == {FATAL}
    if process is split_parts.process_unit:  # a resumed build or a merge reads the same result
        [kept_result] = split_parts.read_results([unit])
        assert (kept_result.rows, kept_result.tally) == (result.rows, result.tally)


def test_splits_are_chosen_only_where_there_are_splits() -> None:
    with pytest.raises(UsageError, match="--only-splits"):
        split_parts.select_splits([""], [0])
