"""Read the sidecars and texts of a unit's rows, and record the rows that a decision drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import units
from lib.core.data_names import find_source
from lib.corpus import chat_rows, work_units
from lib.corpus.documents import DROPPED_ROWS
from lib.corpus.dropped import format_dropped, format_place
from lib.corpus.selection import Decision, TwoPassDecision
from lib.corpus.tally import Tally, format_problem
from lib.corpus.work_units import FileSpan, UnitResult
from lib.curate import row_tally
from lib.curate.masks.mask_options import make_masker
from lib.curate.near.rows import read_sidecar

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

# A function that returns the measurement of a decision for a row, and the kept row it duplicates.
Describe = Callable[[int], "tuple[Any, dict[str, Any] | None]"]
_TEXT_BYTES = 4 * row_tally.READ_CHARACTERS


class UnitRows:
    """The rows of one split of a unit.

    positions: of the rows in their files, counted from 1 (uint64 [rows]). sizes: bytes of text
    (int64 [rows]). Both are empty if no option needs a decision (see selection.py), or if an
    earlier version has written the part without them. rows_before: rows of the file before this
    unit.
    """

    def __init__(self, result: UnitResult, split: str, rows_before: int) -> None:
        import numpy as np

        self.split = split
        self.rows = result.rows[split]
        self._result = result
        arrays = []
        for name in ("positions", "sizes"):
            path = result.unit.part(f"{split}.{name}")
            has_values = self.rows and path.exists()
            values = read_sidecar(path, self.rows, np.uint64) if has_values else np.empty((0, 1))
            arrays.append(values[:, 0].astype(np.uint64))
        self.positions = arrays[0] + np.uint64(rows_before)
        self.sizes = arrays[1].astype(np.int64)

    def list_spans(self) -> Iterator[tuple[FileSpan, int, int]]:
        """Yield each file or span with its first row and the row after its last one."""
        start = 0
        for span, stop in zip(
            self._result.unit.spans, self._result.rows_of[self.split], strict=True
        ):
            yield span, start, stop
            start = stop

    def list_sources(self) -> Iterator[tuple[str, int, int]]:
        """Yield the source of each file or span, its first row and the row after its last one."""
        for span, start, stop in self.list_spans():
            yield find_source(span.file.source), start, stop

    def read_sidecar(self, name: str, dtype: Any = "uint8") -> np.ndarray:
        """Return the values of a sidecar, [rows, values of dtype per row]."""
        return read_sidecar(self._result.unit.part(f"{self.split}.{name}"), self.rows, dtype)

    def read_beginning(self, row: int) -> str:
        """Return the first characters of a row, masked if the dataset is.

        The contents of turns are joined by newlines. Raises IndexError if there is no such row.
        """
        masker = make_masker(self._result.unit.row_options)
        for batch, first in self._read_batches():
            if first <= row < first + batch.num_rows:
                return masker.mask_text(_read_beginning(batch, row - first))
        raise IndexError(row)

    def count_languages(self, is_counted: np.ndarray) -> Counter[str | None]:
        """Return the number of rows in each language. is_counted: bool [rows]."""
        counts: Counter[str | None] = Counter()
        for batch, first in self._read_batches():
            names = batch.column("language").to_pylist()
            of_batch = is_counted[first : first + batch.num_rows].tolist()
            counts.update(name for name, counted in zip(names, of_batch, strict=True) if counted)
        return counts

    def _read_batches(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        import pyarrow as pa

        unit = self._result.unit
        schema = work_units.make_part_schema(unit.row_options)
        first = 0
        with pa.memory_map(str(unit.part(self.split))) as file:
            while file.tell() < file.size():
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
                yield batch, first
                first += batch.num_rows


def _read_beginning(batch: pa.RecordBatch, row: int) -> str:
    """Return the first characters of a row without reading the rest of it."""
    if "text" in batch.schema.names:
        return _decode_beginning(batch.column("text"), row)
    messages = batch.column("messages")
    contents = messages.values.field(chat_rows.CONTENT)
    text = ""
    for turn in range(messages.offsets[row].as_py(), messages.offsets[row + 1].as_py()):
        text += ("\n" if text else "") + _decode_beginning(contents, turn)
        if len(text) > row_tally.READ_CHARACTERS:
            break
    return text


def _decode_beginning(texts: Any, row: int) -> str:
    """Return the first characters of one text of an Arrow array."""
    import numpy as np
    import pyarrow as pa

    _, offsets, data = texts.buffers()
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    edges = np.frombuffer(offsets, kind)[texts.offset + row : texts.offset + row + 2]
    start = int(edges[0])
    size = min(int(edges[1]) - start, _TEXT_BYTES)
    if not size:
        return ""
    # The cut may be inside of a character.
    return data.slice(start, size).to_pybytes().decode("utf-8", "ignore")


class DroppedRows:
    """Records the rows of one split of a unit that decisions drop.

    tally: receives their counts and samples. errors: file for the lines of errors.jsonl.
    """

    def __init__(self, rows: UnitRows, tally: Tally, errors: BinaryIO, has_language: bool) -> None:
        self._rows = rows
        self._tally = tally
        self._errors = errors
        self._has_language = has_language
        self._lines: dict[int, bytes] = {}

    def add(
        self, decision: Decision | TwoPassDecision, is_dropped: np.ndarray, describe: Describe
    ) -> int:
        """Record the rows that a decision drops, and return their number. is_dropped: bool [rows].

        describe: called with the number of a dropped row.
        """
        total = 0
        for span, start, stop in self._rows.list_spans():
            dropped = is_dropped[start:stop].nonzero()[0] + start
            if not len(dropped):
                continue
            total += len(dropped)
            subject = units.counted_are(len(dropped), f"{self._rows.split} row")
            reason = f"{subject} {decision.reason}"
            self._errors.write(
                format_problem(span.file.path, None, None, decision.problem, reason, DROPPED_ROWS)
            )
            self._tally.problems[decision.problem] += 1
            if len(self._rows.sizes):
                sizes = self._rows.sizes[dropped]
                self._tally.row_counts.drop_rows(decision.problem, span.file.source, sizes)
            for row in dropped.tolist():
                self._add_row(decision.problem, span.file.path, row, describe)
        if total and self._has_language:
            languages = self._rows.count_languages(is_dropped)
            self._tally.row_counts.add_languages(languages, is_dropped=True)
        return total

    def _add_row(self, rule: str, path: str, row: int, describe: Describe) -> None:
        positions = self._rows.positions
        position = int(positions[row]) if len(positions) else None
        value, kept_row = describe(row)
        self._lines[row] = format_dropped(path, position, rule, value, kept_row)
        counts = self._tally.row_counts
        key = row_tally.make_key(path, position or row)
        if counts.takes_sample(rule, key):
            text = self._rows.read_beginning(row)
            place = format_place(kept_row) if kept_row else ""
            counts.add_sample(rule, key, path, position or 0, value, text, place)

    def write_lines(self, file: BinaryIO) -> None:
        """Write the lines of dropped.jsonl, in the order of the rows."""
        file.writelines(self._lines[row] for row in sorted(self._lines))
