"""Run the two passes of a curation in worker processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from lib.core import workers
from lib.core.progress import Progress
from lib.core.workers import Pool, Prepare
from lib.curate import unit_files
from lib.curate.first_pass import UnitJudge
from lib.curate.output import WORK, DatasetOutput
from lib.curate.reader import SourceDataset, Unit
from lib.curate.schema import RowSchema
from lib.curate.second_pass import UnitWriter, WriteTask, WrittenUnit
from lib.curate.step import Counts, CurationStep, list_rules
from lib.curate.unit_files import UnitRecord, UnitTask
from lib.curate.whole import WholeDataset

FIRST_PASS = f"{WORK}/first"
_PREPARED = f"{WORK}/prepared"
_DECISIONS = f"{WORK}/decisions"
_WRITTEN = f"{WORK}/written"


@dataclass(frozen=True)
class Curation:
    """Applies steps to a dataset. workers: number of processes. progress: whether it is shown."""

    source: SourceDataset
    steps: Sequence[CurationStep]
    workers: int
    progress: bool

    def prepare(self, directory: Path) -> None:
        """Prepare the steps, each in a directory of its own. directory: of the dataset to build."""
        for step in self.steps:
            work = directory / _PREPARED / step.name
            work.mkdir(parents=True, exist_ok=True)
            step.prepare(self.source, work, self.progress)

    def judge(self, chosen: Sequence[Unit], directory: Path) -> Iterator[UnitRecord]:
        """Show units to the steps, and yield their records in order.

        directory: for the files of the units; those that are complete are not written anew.
        """
        directory.mkdir(parents=True, exist_ok=True)
        tasks = [UnitTask(unit, directory) for unit in chosen]
        with (
            self._start_workers("rows", _prepare_judge, self.steps) as pool,
            Progress("read", sum(unit.bytes for unit in chosen), "B", self.progress) as bar,
        ):
            for task, record in zip(tasks, pool.run(tasks), strict=True):
                yield record
                bar.advance(task.unit.bytes)

    def decide(self, directory: Path, records: Sequence[tuple[Unit, UnitRecord]]) -> WholeDataset:
        """Join the files of the first pass, and let the steps decide about the whole dataset.

        directory: of the dataset to build. records: of all units in order.
        """
        dataset = WholeDataset(
            self.source,
            directory / _DECISIONS,
            list_rules(self.steps),
            [step for step in self.steps if step.start_rewriting()],
            self.workers,
            self.progress,
            start_server,
        )
        dataset.collect(records)
        dataset.decide(self.steps)
        return dataset

    def write(
        self,
        output: DatasetOutput,
        dataset: WholeDataset,
        schema: RowSchema,
        directory: Path,
        records: Sequence[tuple[Unit, UnitRecord]],
    ) -> None:
        """Write the rows that are left, from the first unit that the output lacks."""
        out = directory / _WRITTEN
        out.mkdir(parents=True, exist_ok=True)
        for leftover in out.iterdir():
            leftover.unlink()
        with (
            self._start_workers("written", _prepare_writer, self.steps, schema) as pool,
            Progress("write", self.source.bytes, "B", self.progress) as bar,
        ):
            bar.skip(sum(unit.bytes for unit, _ in records[: output.units]))
            tasks = _list_tasks(dataset, self.steps, records[output.units :], out)
            for written in pool.run(tasks):
                output.add(written)
                bar.advance(written.unit.bytes)

    def add_up(
        self,
        dataset: WholeDataset,
        output: DatasetOutput,
        records: Sequence[tuple[Unit, UnitRecord]],
    ) -> dict[str, Counts]:
        """Return the own counts of each step by its name: of all units and of its decision."""
        total: dict[str, Counts] = {step.name: {} for step in self.steps}
        of_units = (record.counts for _, record in records)
        decided = {step.name: dataset.counts_of(step) for step in self.steps}
        for counts in chain(of_units, [decided, output.counts]):
            for step in self.steps:
                if more := counts.get(step.name):
                    total[step.name] = step.add_counts(total[step.name], more)
        for step in self.steps:
            if rows := step.list_excerpts(dataset):
                shown = {str(row): output.tally.excerpts[str(row)] for row in rows}
                total[step.name] = {**total[step.name], "excerpts": shown}
        return total

    def _start_workers(self, name: str, prepare: Prepare, *arguments: Any) -> Pool:
        count = max(1, min(self.workers, len(self.source.units)))
        return Pool(count, name, prepare, *arguments, context=start_server())


def _prepare_judge(steps: Sequence[CurationStep]) -> Callable[[UnitTask], UnitRecord]:
    return UnitJudge(steps)


def _prepare_writer(
    steps: Sequence[CurationStep], schema: RowSchema
) -> Callable[[WriteTask], WrittenUnit]:
    return UnitWriter(steps, schema)


def read_records(
    source: SourceDataset, find_directory: Callable[[Unit], Path]
) -> list[tuple[Unit, UnitRecord]]:
    """Return each unit with its record. Raises ArtifactError if a record is missing or damaged.

    find_directory: returns where the files of a unit are.
    """
    found = []
    for unit in source.units:
        task = UnitTask(unit, find_directory(unit))
        if (record := unit_files.read_record(task)) is None:
            raise unit_files.describe_damage(unit_files.locate_record(task).with_suffix(""))
        found.append((unit, record))
    return found


def _list_tasks(
    dataset: WholeDataset,
    steps: Sequence[CurationStep],
    records: Sequence[tuple[Unit, UnitRecord]],
    out: Path,
) -> Iterator[WriteTask]:
    import numpy as np

    late = {
        name: dataset.open(name, np.int64) for step in steps for name in step.list_late_columns()
    }
    excerpts = {number for step in steps for number in step.list_excerpts(dataset)}
    deciding = {dataset.find_rule(rule): step for step in steps for rule in step.list_decisions()}
    for unit, record in records:
        rows = slice(unit.start, unit.start + unit.rows)
        fates = dataset.fates.values[rows].copy()
        leaders = dataset.leaders.values[rows].copy()
        earlier = {
            int(leaders[row]): deciding[int(fates[row])].describe_earlier(-int(leaders[row]))
            for row in np.flatnonzero(leaders < 0).tolist()
        }
        yield WriteTask(
            unit,
            record,
            fates,
            dataset.values.values[rows].copy(),
            leaders,
            dataset.copies.values[rows].copy(),
            {name: array.values[rows].copy() for name, array in late.items()},
            earlier,
            dataset.source.validation_rows,
            frozenset(
                number - unit.start
                for number in excerpts
                if unit.start <= number < unit.start + unit.rows
            ),
            out / f"{unit.number:08d}",
        )
        dataset.release()
        for array in late.values():
            array.release()


@cache
def start_server() -> BaseContext:
    """Start the fork server of the workers and return its context.

    The server has imported the workers' modules, so a worker starts in milliseconds.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise importing numpy starts threads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lib.curate.pipeline", "lib.curate.table", "pyarrow"])
    with workers.imports_as_here():
        forkserver.ensure_running()
    return context
