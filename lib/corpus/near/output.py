"""Write what a build adds to a dataset without near duplicates.

`dropped.jsonl` lists every duplicate with the kept row that it duplicates, and `near/` contains the
signatures of the kept rows, for later datasets (signatures.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.corpus import selection
from lib.corpus.dropped import format_dropped
from lib.corpus.near.plan import COPY, RULE_NAMES, NearPlan, PlannedRows
from lib.corpus.near.rows import read_sidecar
from lib.corpus.near.signatures import SignatureWriter
from lib.corpus.row_options import RowOptions
from lib.corpus.work_units import UnitResult

if TYPE_CHECKING:
    import numpy as np


class NearOutput:
    """Follow a plan, row by row. rows: number of rows so far.

    directory: the dataset. dropped: the file dropped.jsonl. The files continue after their present
    end.
    """

    plan: NearPlan

    def __init__(
        self, directory: Path, dropped: BinaryIO, row_options: RowOptions, rows: int
    ) -> None:
        self.rows = rows
        self._directory = directory
        self._row_options = row_options
        self._dropped = dropped
        self._signatures = SignatureWriter(directory, row_options.splits)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file by its path in the dataset."""
        return self._signatures.sizes

    def files(self) -> list[Any]:
        """Return the open files."""
        return self._signatures.files()

    def select(self, rows: int) -> PlannedRows:
        """Return the plan of the next rows."""
        planned = self.plan.select(self.rows, rows)
        self.rows += rows
        return planned

    def write(
        self,
        result: UnitResult,
        split: str,
        planned: PlannedRows,
        copies: np.ndarray | None,
        rows_before: int,
    ) -> None:
        """Write the dropped rows and the signatures of a part.

        copies: how many times each row is written. rows_before: number of rows in the split.
        """
        import numpy as np

        places = self.plan.list_own_places(planned.places)
        for row in np.flatnonzero(planned.rules):
            rule = int(planned.rules[row])
            file, position = map(int, places[row])
            similarity = 1.0 if rule == COPY else float(planned.similarities[row])
            line = format_dropped(
                self.plan.paths[file][0],
                position,
                _name_problem(rule),
                similarity,
                self.plan.describe_row(int(planned.leaders[row]) - 1),
            )
            self._dropped.write(line)
        if copies is None or not copies.any():
            return
        is_kept = copies > 0
        numbers = np.cumsum(copies) - copies + rows_before
        sidecars = {
            name: read_sidecar(result.unit.part(f"{split}.{name}"), len(copies), np.uint64)
            for name in ("keys", "digests")
        }
        values = {**sidecars, "places": places, "rows": numbers.astype(np.uint64)}
        self._signatures.append(split, {name: each[is_kept] for name, each in values.items()})

    def finish(self) -> list[dict[str, Any]]:
        """Return the manifest entries of all files."""
        return self._signatures.finish(self._row_options, self.plan.paths)

    def close(self) -> None:
        """Close the files."""
        self._signatures.close()


def _name_problem(rule: int) -> str:
    return selection.get_decision(RULE_NAMES[rule]).problem
