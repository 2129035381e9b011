"""Show every row to the steps, in worker processes, and keep their verdicts on disk.

The files of a unit are `NUMBER.npz` with the fate of each row and the sidecars, `NUMBER.arrow` with
the new columns, `NUMBER.drops` with a line for each dropped row, and the record `NUMBER.json`. The
record is written last and contains the digests of the others, so a unit with a record is complete,
and a later run does not read it again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, manifest, records
from lib.corpus.arrow_arrays import make_column
from lib.curate.reader import Unit
from lib.curate.rows import RowBatch
from lib.curate.schema import add_columns
from lib.curate.step import Counts, RunningStep, Step

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

KEPT = 0  # the fate of a row that is kept; otherwise 1 + the number of the rule that drops it
FATES = "fates"
_RECORD = ".json"
_ARRAYS = ".npz"
_COLUMNS = ".arrow"
_DROPS = ".drops"


@dataclass(frozen=True)
class UnitTask:
    """Describes a unit that a worker shows to the steps. directory: for the files of the unit."""

    unit: Unit
    directory: Path


@dataclass(frozen=True)
class UnitRecord:
    """Describes the finished files of a unit.

    path: the common beginning of their paths. alone: by rule, the number of rows that it would drop
    alone. counts: the own counts of the steps, by name.
    """

    path: Path
    digests: dict[str, str]
    alone: dict[str, int]
    counts: dict[str, Counts]

    def read_arrays(self) -> Mapping[str, np.ndarray]:
        """Return the fates (uint8 [rows]) and the sidecars."""
        import numpy as np

        with np.load(self.path.with_suffix(_ARRAYS), allow_pickle=False) as arrays:
            return dict(arrays)

    def read_columns(self) -> pa.RecordBatch | None:
        """Return the new columns of all rows, None if there are none."""
        import pyarrow as pa

        path = self.path.with_suffix(_COLUMNS)
        if path.name not in self.digests:
            return None
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            return stream.read_all().combine_chunks().to_batches()[0]

    def read_drops(self) -> dict[int, Any]:
        """Return the measurement of each dropped row, by its number in the unit."""
        lines = self.path.with_suffix(_DROPS).read_bytes().splitlines()
        return dict(map(json.loads, lines))


def list_rules(steps: Sequence[Step]) -> dict[str, str]:
    """Return the rules of all steps in their order: for each the option, as typed."""
    return {rule: option for step in steps for rule, option in step.list_rules().items()}


def locate_record(task: UnitTask) -> Path:
    """Return the path of the record of a unit."""
    return task.directory / f"{task.unit.number:08d}{_RECORD}"


def read_record(task: UnitTask) -> UnitRecord | None:
    """Return the record of a unit whose files are complete, otherwise None."""
    path = locate_record(task)
    try:
        content = hashing.open_record(records.read_mapping(path))
    except ValueError:
        return None
    if not content:
        return None
    return UnitRecord(path.with_suffix(""), content["digests"], content["alone"], content["counts"])


def is_undamaged(record: UnitRecord) -> bool:
    """Return whether the files of a unit have the recorded content."""
    paths = {record.path.with_name(name): digest for name, digest in record.digests.items()}
    return all(path.is_file() and hashing.has_digest(path, paths[path]) for path in paths)


class UnitJudge:
    """Shows units to the steps; each worker process has one."""

    def __init__(self, steps: Sequence[Step]) -> None:
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

    def __init__(self, steps: Sequence[Step], rules: Mapping[str, int], task: UnitTask) -> None:
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
        drops = self._path.with_suffix(_DROPS)
        drops.write_bytes(b"".join(self._drops))
        digests = {path.name: hashing.file_digest(path) for path in (*paths, drops)}
        counts = {name: running.count() for name, running in self._running.items()}
        record = UnitRecord(self._path, digests, dict(self._alone), counts)
        content = {"digests": digests, "alone": record.alone, "counts": counts}
        manifest.write_json(self._path.with_suffix(_RECORD), hashing.seal_record(content))
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
        path = self._path.with_suffix(_ARRAYS)
        np.savez(path, allow_pickle=False, fates=np.concatenate(self._fates), **arrays)
        yield path

    def _write_columns(self) -> Iterator[Path]:
        if not self._columns:
            return
        import pyarrow as pa

        schema = add_columns(pa.schema([]), self._kinds)
        arrays = [make_column(self._columns[field.name], field.type) for field in schema]
        path = self._path.with_suffix(_COLUMNS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_batch(pa.record_batch(arrays, schema=schema))
        yield path
