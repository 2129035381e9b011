"""Show every row to the steps, in worker processes, and keep their verdicts on disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, manifest
from lib.corpus.arrow_arrays import make_column
from lib.curate.rows import RowBatch
from lib.curate.schema import add_columns
from lib.curate.step import CurationStep, RunningStep, list_rules
from lib.curate.unit_files import (
    ARRAYS,
    COLUMNS,
    DROPS,
    KEPT,
    RECORD,
    UnitRecord,
    UnitTask,
    is_undamaged,
    locate_record,
    read_record,
)

if TYPE_CHECKING:
    import numpy as np


class UnitJudge:
    """Shows units to the steps; each worker process has one."""

    def __init__(self, steps: Sequence[CurationStep]) -> None:
        self._steps = steps
        self._rules = {rule: number for number, rule in enumerate(list_rules(steps), 1)}

    def __call__(self, task: UnitTask) -> UnitRecord:
        """Return the record of a unit, after writing its files unless they are complete."""
        record = read_record(task)
        if record and is_undamaged(record):
            return record
        return _UnitFiles(self._steps, self._rules, task).write()


class _UnitFiles:
    """Collects the verdicts about the rows of a unit, and writes its files."""

    def __init__(
        self, steps: Sequence[CurationStep], rules: Mapping[str, int], task: UnitTask
    ) -> None:
        self._path = locate_record(task).with_suffix("")
        self._unit = task.unit
        self._rules = rules
        self._running: dict[str, RunningStep] = {
            step.name: running for step in steps if (running := step.start())
        }
        self._inputs = [name for step in steps for name in step.list_inputs()]
        self._kinds = {name: kind for step in steps for name, kind in step.list_columns().items()}
        self._fates: list[np.ndarray] = []
        self._sidecars: dict[str, list[np.ndarray]] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in self._kinds}
        self._drops: list[bytes] = []
        self._alone: Counter[str] = Counter()
        self._rows = 0

    def write(self) -> UnitRecord:
        """Show the rows to the steps, write the files and return the record."""
        for batch in self._unit.read_rows(self._inputs):
            self._judge(batch)
        paths = [*self._write_arrays(), *self._write_columns()]
        drops = self._path.with_suffix(DROPS)
        drops.write_bytes(b"".join(self._drops))
        digests = {path.name: hashing.file_digest(path) for path in (*paths, drops)}
        counts = {name: running.count() for name, running in self._running.items()}
        record = UnitRecord(self._path, digests, dict(self._alone), counts)
        content = {"digests": digests, "alone": record.alone, "counts": counts}
        manifest.write_json(self._path.with_suffix(RECORD), hashing.seal_record(content))
        return record

    def _judge(self, batch: RowBatch) -> None:
        """Show a batch to all steps; the first rule that drops a row is recorded."""
        import numpy as np

        fates = np.zeros(len(batch.rows), np.uint8)
        values: dict[int, Any] = {}
        for running in self._running.values():
            result = running.run(batch)
            batch.columns.update(result.columns)
            for name, array in result.sidecars.items():
                self._sidecars.setdefault(name, []).append(array)
            for verdict in result.verdicts:
                self._alone[verdict.rule] += int(verdict.dropped.sum())
                is_first = verdict.dropped & (fates == KEPT)
                fates[is_first] = self._rules[verdict.rule]
                for row in np.flatnonzero(is_first).tolist():
                    values[row] = verdict.values[row] if len(verdict.values) else None
        self._drops += [
            json.dumps([self._rows + row, values[row]]).encode() + b"\n" for row in sorted(values)
        ]
        for name, column in self._columns.items():
            column += batch.columns[name]
        self._fates.append(fates)
        self._rows += len(batch.rows)

    def _write_arrays(self) -> Iterator[Path]:
        import numpy as np

        arrays = {name: np.concatenate(pieces) for name, pieces in self._sidecars.items()}
        path = self._path.with_suffix(ARRAYS)
        np.savez(path, allow_pickle=False, fates=np.concatenate(self._fates), **arrays)
        yield path

    def _write_columns(self) -> Iterator[Path]:
        if not self._columns:
            return
        import pyarrow as pa

        schema = add_columns(pa.schema([]), self._kinds)
        arrays = [make_column(self._columns[field.name], field.type) for field in schema]
        path = self._path.with_suffix(COLUMNS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_batch(pa.record_batch(arrays, schema=schema))
        yield path
