"""Follow a plan in the second pass, and write the signatures of the kept rows.

If near duplicates are dropped, `near/` contains the signatures of the kept rows, for later datasets
(signatures.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.corpus.row_options import RowOptions
from lib.corpus.unit_rows import UnitRows
from lib.curate import row_tally
from lib.curate.near.plan import PlannedRows, RowPlan
from lib.curate.near.signatures import SignatureWriter
from lib.curate.row_tally import RowTally

if TYPE_CHECKING:
    import numpy as np


class PlanOutput:
    """Follows a plan, row by row.

    directory: the dataset; signatures are appended to its files. rows: number of rows so far.
    """

    plan: RowPlan

    def __init__(self, directory: Path, row_options: RowOptions, rows: int) -> None:
        self.rows = rows
        self._directory = directory
        self._row_options = row_options
        self._signatures = (
            SignatureWriter(directory, row_options.splits) if row_options.drops_near else None
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file by its path in the dataset."""
        return self._signatures.sizes if self._signatures else {}

    def files(self) -> list[Any]:
        """Return the open files."""
        return self._signatures.files() if self._signatures else []

    def select(self, rows: UnitRows) -> PlannedRows:
        """Return the plan of the next rows."""
        planned = self.plan.select(self.rows, rows.rows)
        self.rows += rows.rows
        return planned

    def describe_dropped(
        self, planned: PlannedRows, row: int
    ) -> tuple[float, dict[str, Any] | None]:
        """Return the similarity of a dropped row to the kept row that it duplicates, and that row.

        For a row with a low score, returns the score and None. row: its index in `planned`.
        """
        leader = int(planned.leaders[row]) - 1
        return planned.find_value(row), self.plan.describe_row(leader) if leader >= 0 else None

    def add_excerpts(self, rows: UnitRows, counts: RowTally) -> None:
        """Keep the beginning of the kept row of each of the largest clusters.

        rows: the rows of the last call of `select`.
        """
        first = self.plan.first_new + self.rows - rows.rows
        for _, number in self.plan.largest:
            if first <= number < first + rows.rows:
                text = rows.read_beginning(number - first)
                counts.excerpts[str(number)] = row_tally.cut_text(text)

    def write(
        self,
        rows: UnitRows,
        planned: PlannedRows,
        copies: np.ndarray | None,
        rows_before: int,
    ) -> None:
        """Write the signatures of the kept rows of a part.

        copies: how many times each row is written. rows_before: number of rows in the split.
        """
        import numpy as np

        if self._signatures is None or copies is None or not copies.any():
            return
        is_kept = copies > 0
        numbers = np.cumsum(copies) - copies + rows_before
        values = {name: rows.read_sidecar(name, np.uint64) for name in ("keys", "digests")}
        values["places"] = self.plan.list_own_places(planned.places)
        values["rows"] = numbers.astype(np.uint64)
        self._signatures.append(
            rows.split, {name: array[is_kept] for name, array in values.items()}
        )

    def finish(self) -> list[dict[str, Any]]:
        """Return the manifest entries of all files."""
        if self._signatures is None:
            return []
        return self._signatures.finish(self._row_options, self.plan.paths)

    def close(self) -> None:
        """Close the files."""
        if self._signatures:
            self._signatures.close()
