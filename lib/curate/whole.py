"""Hold what the first pass found out about all rows, in arrays on disk, for `decide` of the steps.

Memory does not grow with the number of rows. The rows are numbered from 0 in the order of the
units, so validation rows have lower numbers than training rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol

from lib.core import hashing, manifest, records
from lib.curate import places, unit_files
from lib.curate.disk_array import DiskArray
from lib.curate.reader import SourceDataset, Unit
from lib.curate.unit_files import FATES, UnitRecord

_STATE = "state.json"
_VALUES = "values"
_LEADERS = "leaders"
_COPIES = "copies"
_COLLECTED = "collected"
_DECIDED = "decided"
_VERSION = 1  # of the files; those of another version are written anew


class DecidingStep(Protocol):
    """A step (see step.py) as far as this module knows it."""

    @property
    def name(self) -> str:
        """Return the name of the step."""
        ...

    def list_decisions(self) -> list[str]:
        """Return the rules that `decide` applies."""
        ...

    def decide(self, dataset: WholeDataset) -> dict[str, Any]:
        """Drop rows that only the whole dataset shows; return counts."""
        ...


class ChangingStep(Protocol):
    """A step that changes rows, as far as this module knows it."""

    def identify(self) -> dict[str, Any]:
        """Return what the result depends on."""
        ...

    def start_rewriting(self) -> Any:
        """Return what changes rows."""
        ...


class WholeDataset:
    """The fate of each row, and the sidecars, one entry per row.

    source: the dataset. directory: for the arrays and for files of the steps. rules: of all steps
    in their order. changing: the steps that change rows in the second pass. workers: number of
    processes that a step may use. progress: whether a step shows its progress. start_server: starts
    what these processes are forked from.

    fates: uint8, see unit_files. values: float32, the measurement of a decision. leaders: int64, 1
    + the number of the kept row that a row duplicates; a negative number −n stands for the n-th of
    the rows that the step itself knows (`describe_earlier`), and 0 for none. copies: uint16, how
    many times a kept row is written.
    """

    def __init__(
        self,
        source: SourceDataset,
        directory: Path,
        rules: Iterable[str],
        changing: Sequence[ChangingStep],
        workers: int,
        progress: bool,
        start_server: Callable[[], BaseContext],
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.source = source
        self.directory = directory
        self.changing = changing
        self.workers = workers
        self.progress = progress
        self.start_server = start_server
        self._rules = {rule: number for number, rule in enumerate(rules, 1)}
        self._state = _read_state(directory / _STATE)
        if self._state.get("version") != _VERSION:
            self._state = {"version": _VERSION}

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.source.rows

    def collect(self, units: Iterable[tuple[Unit, UnitRecord]]) -> None:
        """Join the arrays of all units, which are given in order; a second call does nothing.

        Raises ArtifactError if the files of a unit are damaged.
        """
        import numpy as np

        if not self._state.get(_COLLECTED):
            files: dict[str, Any] = {}
            for _, record in units:
                if not unit_files.is_undamaged(record):
                    raise unit_files.describe_damage(record.path)
                for name, array in record.read_arrays().items():
                    if name not in files:
                        files[name] = (self.directory / name).open("wb")
                    files[name].write(array.tobytes())
            for file in files.values():
                file.close()
            for name, kind in ((_VALUES, np.float32), (_LEADERS, np.int64), (_COPIES, np.uint16)):
                DiskArray(self.directory / name, kind, (self.rows,))
            DiskArray(self.directory / _COPIES, np.uint16).values[:] = 1
            self._note({_COLLECTED: True})
        self.fates = self.open(FATES, np.uint8)
        self.values = self.open(_VALUES, np.float32)
        self.leaders = self.open(_LEADERS, np.int64)
        self.copies = self.open(_COPIES, np.uint16)

    def decide(self, steps: Iterable[DecidingStep]) -> None:
        """Let each step make its decision about the whole dataset, unless it has made it."""
        for step in steps:
            if step.name not in self._state.get(_DECIDED, {}):
                self._undo(step)
                counts = step.decide(self)
                decided = self._state.get(_DECIDED, {}) | {step.name: counts}
                self._note({_DECIDED: decided})

    def counts_of(self, step: DecidingStep) -> dict[str, Any]:
        """Return the counts that `decide` of a step has returned."""
        counts: dict[str, Any] = self._state[_DECIDED][step.name]
        return counts

    def open(self, name: str, dtype: Any, width: int = 0) -> DiskArray:
        """Return a sidecar, or a file that a step has written into `directory`."""
        return DiskArray(self.directory / name, dtype, width=width)

    def locate_row(self, number: int) -> dict[str, Any]:
        """Return the split of a row and its number there."""
        return places.locate_row(number, self.source.validation_rows)

    def find_rule(self, rule: str) -> int:
        """Return the number that stands for a rule in `fates`."""
        return self._rules[rule]

    def recall(self, step: DecidingStep, name: str) -> Any:
        """Return what the step has noted under a name, None if nothing."""
        return self._state.get(f"{step.name}: {name}")

    def note(self, step: DecidingStep, name: str, value: Any) -> None:
        """Note that a part of a decision is finished, so that it is not repeated after a kill.

        value: for JSON.
        """
        self._note({f"{step.name}: {name}": value})

    def release(self) -> None:
        """Remove the arrays from memory."""
        for array in (self.fates, self.values, self.leaders, self.copies):
            array.release()

    def _undo(self, step: DecidingStep) -> None:
        """Keep the rows that a killed run had dropped by a decision of the step."""
        import numpy as np

        rules = [self._rules[rule] for rule in step.list_decisions()]
        if not rules:
            return
        for first, fates in self.fates.blocks():
            is_undone = np.isin(fates, rules)
            rows = slice(first, first + len(fates))
            for array in (self.fates, self.values, self.leaders):
                array.values[rows][is_undone] = 0
            self.release()

    def _note(self, facts: dict[str, Any]) -> None:
        os.sync()  # the files must be on disk before the record says that they are complete
        self._state |= facts
        manifest.write_json(self.directory / _STATE, hashing.seal_record(self._state))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return hashing.open_record(records.read_mapping(path))
    except ValueError:
        return {}
