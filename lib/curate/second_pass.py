"""Write the rows that are left, unit by unit, in worker processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.corpus.arrow_arrays import pack_flags, wrap_numbers
from lib.corpus.parts import MessageFile
from lib.curate import row_tally
from lib.curate.places import describe_place, locate_row
from lib.curate.reader import Unit
from lib.curate.row_tally import READ_CHARACTERS, RowTally
from lib.curate.row_texts import list_sources, list_text_bytes, read_beginning
from lib.curate.schema import RowSchema
from lib.curate.step import Counts, CurationStep, Rewriting, list_rules
from lib.curate.unit_files import KEPT, UnitRecord

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_DIGITS = 4  # decimals of a value
_LANGUAGE = "language"  # a column by which the report counts rows


@dataclass(frozen=True)
class WriteTask:
    """Describes the rows of a unit that a worker writes.

    record: of the first pass. fates, values, leaders, copies: see WholeDataset, for the rows of the
    unit. late: the columns that decisions add. earlier: places of the rows that negative leaders
    stand for. validation_rows: number of rows of the split `validation`, which come first.
    excerpts: the rows, by their number in the unit, of which the report shows the beginning. out:
    the file to write.
    """

    unit: Unit
    record: UnitRecord
    fates: np.ndarray
    values: np.ndarray
    leaders: np.ndarray
    copies: np.ndarray
    late: Mapping[str, np.ndarray]
    earlier: Mapping[int, dict[str, Any]]
    validation_rows: int
    excerpts: frozenset[int]
    out: Path


@dataclass
class WrittenUnit:
    """Describes a written unit.

    rows, text_bytes: of the file `out`. dropped: lines of dropped.jsonl.
    counts: the own counts of the steps that change rows, by name.
    """

    unit: Unit
    out: Path
    rows: int = 0
    text_bytes: int = 0
    dropped: list[bytes] = field(default_factory=list)
    dropped_by_rule: Counter[str] = field(default_factory=Counter)
    tally: RowTally = field(default_factory=RowTally)
    counts: dict[str, Counts] = field(default_factory=dict)


class UnitWriter:
    """Writes units; each worker process has one."""

    def __init__(self, steps: Sequence[CurationStep], schema: RowSchema) -> None:
        self._steps = {step.name: step for step in steps}
        self._schema = schema
        self._rules = ["", *list_rules(steps)]
        self._rewriting: dict[str, Rewriting] = {
            step.name: rewriting for step in steps if (rewriting := step.start_rewriting())
        }

    def __call__(self, task: WriteTask) -> WrittenUnit:
        """Write the kept rows of a unit, and describe the others."""
        written = WrittenUnit(task.unit, task.out)
        values = task.record.read_drops()
        columns = task.record.read_columns()
        with MessageFile.open(task.out, self._schema.output) as file:
            first = 0
            for batch in task.unit.read():
                rows = range(first, first + batch.num_rows)
                first += batch.num_rows
                self._describe(task, batch, rows, values, columns, written)
                if kept_rows := self._select(task, batch, rows, columns, written):
                    written.rows += kept_rows.num_rows
                    written.text_bytes += int(list_text_bytes(kept_rows).sum())
                    file.write_batch(kept_rows)
        return written

    def _select(
        self,
        task: WriteTask,
        batch: pa.RecordBatch,
        rows: range,
        columns: pa.RecordBatch | None,
        written: WrittenUnit,
    ) -> pa.RecordBatch | None:
        """Return the kept rows of a batch as they are written, None if none is kept."""
        import numpy as np

        own_rows = slice(rows.start, rows.stop)
        copies = np.where(task.fates[own_rows] == KEPT, task.copies[own_rows], 0)
        if not copies.any():
            return None
        batch = self._schema.convert(batch)
        for name in self._schema.added:
            if name in task.late:
                batch = batch.append_column(name, wrap_numbers(task.late[name][own_rows]))
            elif columns is not None:
                column = columns.column(columns.schema.get_field_index(name))
                batch = batch.append_column(name, column.slice(rows.start, len(rows)))
        if not (copies > 0).all():
            batch = batch.filter(pack_flags(copies > 0))
        for name, rewriting in self._rewriting.items():
            batch, counts = rewriting.rewrite(batch)
            before = written.counts.get(name, {})
            written.counts[name] = self._steps[name].add_counts(before, counts)
        if (copies > 1).any():
            times = copies[copies > 0]
            batch = batch.take(wrap_numbers(np.repeat(np.arange(len(times)), times)))
        return batch

    def _describe(
        self,
        task: WriteTask,
        batch: pa.RecordBatch,
        rows: range,
        values: Mapping[int, Any],
        columns: pa.RecordBatch | None,
        written: WrittenUnit,
    ) -> None:
        """Count the rows of a batch, and describe those that are dropped."""
        import numpy as np

        sources = list_sources(batch)
        sizes = list_text_bytes(batch)
        tally = written.tally
        for source, members in groupby(range(len(rows)), sources.__getitem__):
            numbers = list(members)
            tally.add_rows(source, sizes[numbers[0] : numbers[-1] + 1])
        languages = _list_languages(batch, rows, columns)
        tally.add_languages(Counter(languages))
        for row in sorted(task.excerpts & set(range(rows.start, rows.stop))):
            text = self._show(read_beginning(batch, row - rows.start, READ_CHARACTERS))
            tally.excerpts[str(task.unit.start + row)] = row_tally.cut_text(text)
        by_rule: dict[tuple[str, str], list[int]] = {}
        for place in np.flatnonzero(task.fates[rows.start : rows.stop]).tolist():
            row = rows.start + place
            rule = self._rules[task.fates[row]]
            value = values[row] if row in values else float(task.values[row])
            leader = find_leader(task, row)
            number = task.unit.first + row
            line = {
                "split": task.unit.split,
                "row": number,
                **({"source": sources[place]} if sources[place] else {}),
                "rule": rule,
                "value": round(value, _DIGITS) if isinstance(value, float) else value,
                "duplicate_of": leader,
            }
            written.dropped.append(json.dumps(line).encode() + b"\n")
            by_rule.setdefault((rule, sources[place]), []).append(place)
            key = row_tally.make_key(task.unit.split, number)
            if tally.takes_sample(rule, key):
                text = self._show(read_beginning(batch, place, READ_CHARACTERS))
                where = sources[place] or task.unit.split
                tally.add_sample(rule, key, where, number, value, text, describe_place(leader))
        for (rule, source), places in by_rule.items():
            tally.drop_rows(rule, source, sizes[places])
            written.dropped_by_rule[rule] += len(places)
            if languages:
                lost = Counter(languages[place] for place in places)
                tally.add_languages(lost, is_dropped=True)

    def _show(self, text: str) -> str:
        for rewriting in self._rewriting.values():
            text = rewriting.show(text)
        return text


def find_leader(task: WriteTask, row: int) -> dict[str, Any] | None:
    """Return the place of the row that a dropped row duplicates, None if there is none.

    row: its number in the unit.
    """
    leader = int(task.leaders[row])
    if leader < 0:
        return task.earlier[leader]
    return locate_row(leader - 1, task.validation_rows) if leader else None


def _list_languages(
    batch: pa.RecordBatch, rows: range, columns: pa.RecordBatch | None
) -> list[str]:
    """Return the values of the column `language`, new or of the input; [] without one."""
    if columns is not None and _LANGUAGE in columns.schema.names:
        return columns.column(_LANGUAGE).slice(rows.start, len(rows)).to_pylist()
    return batch.column(_LANGUAGE).to_pylist() if _LANGUAGE in batch.schema.names else []
