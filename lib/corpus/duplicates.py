"""Find the rows of a dataset that equal an earlier row, and describe them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.core import units
from lib.corpus.dedup import DIGEST_BYTES, DigestSet
from lib.corpus.documents import DROPPED_ROWS
from lib.corpus.dropped import KeptPlaces, format_dropped
from lib.corpus.tally import format_problem
from lib.corpus.work_units import UnitResult

if TYPE_CHECKING:
    import numpy as np

KIND = "duplicate"


class UnitSelection(NamedTuple):
    """Contains which rows of a unit are kept (bool [rows]).

    problems, dropped: lines of errors.jsonl and of dropped.jsonl about the others.
    """

    is_kept: np.ndarray
    problems: list[bytes]
    dropped: list[bytes]


class DuplicateFinder:
    """Finds the rows that equal an earlier row, in the order of the dataset.

    path: the common beginning of the names of its files. A resumed build first truncates them to
    the recorded progress.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = DigestSet(path)
        self._places = KeptPlaces(path)

    @property
    def files(self) -> dict[str, Any]:
        """Return the open files by name."""
        places = {f"{self._path.name}.{end}": file for end, file in self._places.files.items()}
        return {self._path.name: self._digests.file, **places}

    def select(self, result: UnitResult, split: str, rows_before: int) -> UnitSelection:
        """Return which rows of one split of the next unit are kept.

        rows_before: rows of the same file before this unit, if it is a span of a large file.
        """
        import numpy as np

        unit = result.unit
        digests = np.fromfile(unit.part(f"{split}.digests"), np.uint8).reshape(-1, DIGEST_BYTES)
        is_kept = self._digests.add(digests)
        positions = np.zeros(len(digests), np.uint64)
        if (path := unit.part(f"{split}.positions")).exists():  # some earlier versions lack it
            positions = np.fromfile(path, np.uint64) + np.uint64(rows_before)
        selection = UnitSelection(is_kept, [], [])
        start = 0
        for span, stop in zip(unit.spans, result.rows_of[split], strict=True):
            rows = slice(start, stop)
            kept_positions = positions[rows][is_kept[rows]]
            if len(kept_positions):
                self._places.append(span.file.path, kept_positions)
            if len(kept_positions) < stop - start:
                numbers = self._digests.find_numbers(digests[rows][~is_kept[rows]])
                repeated = positions[rows][~is_kept[rows]]
                self._describe(span.file.path, split, repeated, numbers, selection)
            start = stop
        return selection

    def _describe(
        self,
        path: str,
        split: str,
        positions: np.ndarray,
        numbers: np.ndarray,
        selection: UnitSelection,
    ) -> None:
        """Describe the dropped rows of a file. numbers: the kept row that each one equals."""
        subject = units.counted_are(len(positions), f"{split} row")
        text = f"{subject} equal to an earlier row"
        selection.problems.append(format_problem(path, None, None, KIND, text, DROPPED_ROWS))
        for position, number in zip(positions.tolist(), numbers.tolist(), strict=True):
            kept_row = self._places.describe_row(number)
            selection.dropped.append(format_dropped(path, position or None, KIND, 1.0, kept_row))

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()
