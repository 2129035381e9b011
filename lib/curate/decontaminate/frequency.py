"""Find the n-grams of test questions that are frequent in the corpus, from a sample of its rows.

A rule must know them before it sees the first row. A first pass over all rows would double the time
of a build, so a sample decides. It depends on the input alone, and not on workers or machines: the
first rows of at most 64 work units, which are spread evenly over the input. Each unit contributes
an equal share of 64 million characters, or less if it is smaller.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from lib.core import declared, hashing
from lib.core.progress import Progress
from lib.core.units import ceil_div
from lib.corpus import selection, work_units
from lib.corpus.pool import ProcessUnit, UnitPool
from lib.corpus.row_batch import RowBatch, RowVerdict
from lib.corpus.row_options import RowOptions
from lib.corpus.work_units import WorkUnit
from lib.curate.decontaminate import index, matching
from lib.curate.decontaminate.index import Frequent, Index
from lib.curate.decontaminate.prepared import PreparedOptions, add_index

if TYPE_CHECKING:
    import numpy as np

FREQUENT = 0.001  # share of the rows from which an n-gram is frequent
# An n-gram in at most this many rows is never frequent; otherwise copies in a tiny corpus would be.
FEWEST_ROWS = 10
MOST_UNITS = 64
MOST_CHARACTERS = 1 << 26  # characters of the sample, for all units together


class UnitSample(NamedTuple):
    """Contains the number of rows of a unit with each n-gram of test questions.

    rows: number of rows read. members: the n-grams that occur, by their numbers in the index.
    counts: the number of rows with each of them.
    """

    rows: int
    members: np.ndarray
    counts: np.ndarray


class _Enough(Exception):
    """Raised to end the reading of a unit after enough rows."""


class _Counter:
    """Counts in how many rows each n-gram of an index occurs."""

    def __init__(self, test_index: Index, characters: int) -> None:
        import numpy as np

        self.rows = 0
        self.counts = np.zeros(len(test_index.hashes), np.int32)
        self._index = test_index
        self._left = characters

    def __call__(self, batch: RowBatch) -> RowVerdict:
        """Count the n-grams of the rows until the limit, as a rule that drops all rows."""
        import numpy as np

        characters = np.cumsum([len(text) for text in batch.texts])
        last = int(np.searchsorted(characters, self._left)) + 1
        if last < len(batch.rows):
            batch = RowBatch(batch.rows[:last])
        grams = matching.hash_batch(batch)
        positions, members = index.find_members(self._index, grams.hashes)
        rows = np.searchsorted(grams.ends, positions, "right")
        pairs = np.unique(rows * len(self.counts) + members)
        np.add.at(self.counts, pairs % max(1, len(self.counts)), 1)
        self.rows += len(batch.rows)
        self._left -= int(characters[len(batch.rows) - 1])
        if self._left <= 0:
            raise _Enough
        return RowVerdict(np.ones(len(batch.rows), bool))


def sample_corpus(
    row_options: RowOptions,
    test_index: str,
    units: Sequence[WorkUnit],
    workers: int,
    progress: bool,
) -> tuple[np.ndarray, Frequent]:
    """Return which n-grams of an index are frequent in the corpus (bool), and how they were found.

    test_index: directory of the index. units: all work units of the input, in their order.
    """
    import numpy as np

    reading_options = add_index(_make_reading_options(row_options), test_index)
    step = max(1, ceil_div(len(units), MOST_UNITS))
    chosen = [dataclasses.replace(unit, row_options=reading_options) for unit in units[::step]]
    rows = 0
    test_hashes = matching.open_cached(test_index).hashes
    counts = np.zeros(len(test_hashes), np.int64)
    read_beginnings = cast(ProcessUnit, _SampleUnit(len(chosen)))
    with (
        UnitPool(min(workers, len(chosen)), read_beginnings) as pool,
        Progress("sample", len(chosen), "unit", progress) as bar,
    ):
        for sample in cast(Iterator[UnitSample], pool.run(chosen)):
            rows += sample.rows
            counts[sample.members] += sample.counts
            bar.advance()
    least = max(FEWEST_ROWS, int(FREQUENT * rows))
    is_frequent = counts > least
    ignored = test_hashes[is_frequent]
    digest = hashing.fingerprint(ignored.tolist())
    return is_frequent, Frequent(rows, least, len(ignored), digest)


def _make_reading_options(row_options: RowOptions) -> RowOptions:
    """Return options that read the same rows without rules, columns and sidecars."""
    tables = (
        *(selection.RULES, selection.RULE_GROUPS, selection.COLUMNS),
        *(selection.DECISIONS, selection.TWO_PASS_DECISIONS),
    )
    names = {row.option for table in tables for row in table.values()} - {"decontaminate"}
    defaults = {
        field.name: declared.default_of(field)
        for field in dataclasses.fields(row_options)
        if field.name in names
    }
    return dataclasses.replace(row_options, **defaults, validation_percent=0.0)


class _SampleUnit:
    """Reads the first rows of a unit. units: number of units that are sampled."""

    def __init__(self, units: int) -> None:
        self._characters = MOST_CHARACTERS // units

    def __call__(self, unit: WorkUnit) -> UnitSample:
        """Return the counts of a unit."""
        import numpy as np

        assert isinstance(unit.row_options, PreparedOptions)
        counter = _Counter(matching.open_cached(unit.row_options.test_index), self._characters)
        unit_options = dataclasses.replace(unit.row_options, counter=counter)
        beside = Path(unit.row_options.test_index).parent
        with tempfile.TemporaryDirectory(dir=beside) as out, suppress(_Enough):
            work_units.process_unit(dataclasses.replace(unit, row_options=unit_options, out=out))
        members = np.flatnonzero(counter.counts)
        return UnitSample(counter.rows, members, counter.counts[members])
