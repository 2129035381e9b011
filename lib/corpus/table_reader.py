"""Reads CSV and TSV: the first row names the columns, then each row is a document."""

from __future__ import annotations

import csv
import re
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lib.core import units
from lib.corpus.documents import DROPPED, DROPPED_REST, KEPT, TOO_LARGE, Documents
from lib.corpus.raw_file import LARGE_BYTES, RawFile

if TYPE_CHECKING:
    from _csv import Dialect

_LONG_ROW = 20  # lines
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


_Line = tuple[int | None, int, str]  # offset (bytes) if it is known, number from 1, text with end


class _Lines:
    """Decodes the lines of a file.

    row: those that were read of the row at hand. last: read last. repeated: come once
    more, first.
    """

    def __init__(self, raw: RawFile, documents: Documents) -> None:
        self._lines = raw.read_lines()
        self._documents = documents
        self.repeated: deque[_Line] = deque()
        self._number = 0
        self.row: list[_Line] = []
        self.last: _Line = (0, 0, "\n")

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self.repeated:
            self.last = self.repeated.popleft()
        else:
            offset, line = next(self._lines)
            self._number += 1
            while line is None:
                self._documents.note(*TOO_LARGE, DROPPED, offset, self._number)
                offset, line = next(self._lines)
                self._number += 1
            self.last = offset, self._number, self._documents.decode(line)
        self.row.append(self.last)
        return self.last[2]


def read_table(raw: RawFile, documents: Documents) -> None:
    """Hand on one document per row; a row that is not CSV is dropped and the next one read."""
    csv.field_size_limit(LARGE_BYTES)
    lines = _Lines(raw, documents)
    rows = csv.reader(lines, strict=True, delimiter="\t" if raw.kind == "tsv" else ",")
    header: list[str] | None = None
    while True:
        lines.row = []
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            _drop_row(lines, header, rows.dialect, str(error), documents)
            continue
        if raw.damage and not lines.last[2].endswith("\n"):
            break  # the last row is cut
        if header is None:
            header = row
        elif row:
            offset, number, _ = lines.row[0]
            if len(lines.row) >= _LONG_ROW and _are_rows(lines.row[1:], header, rows.dialect):
                documents.note(
                    "quote",
                    f"this row takes lines {number:,} to {lines.last[1]:,}, "
                    "which look like rows: a quote may not be closed in it",
                    KEPT,
                    offset,
                    number,
                )
            documents.add_value(_make_document(header, row, documents.as_data), offset, number)
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST, *lines.last[:2])


def _drop_row(
    lines: _Lines, header: list[str] | None, dialect: Dialect, error: str, documents: Documents
) -> None:
    """Note a row that is not CSV, with what it took along.

    A quote that is not closed takes all lines up to the next quote, or to the end. Where these are
    rows by their number of cells, only the line with the quote is dropped.
    """
    (offset, number, _), *rest = lines.row
    last = lines.last[1]
    what = f"not valid CSV: {error}"
    if rest and _are_rows(rest, header, dialect):
        what += (
            f"; the {units.counted(len(rest), 'line')} that its quote took along, up to line "
            f"{last:,}, are read as rows"
        )
        lines.repeated.extendleft(reversed(rest))
    elif rest:
        what += (
            f"; a quote that opens in line {number:,} took lines {number:,} to {last:,} "
            f"along, {units.counted(len(lines.row), 'line')} in all"
        )
        documents.tally.lines_lost += len(lines.row)
    documents.note("syntax", what, DROPPED, offset, number)


def _are_rows(lines: list[_Line], header: list[str] | None, dialect: Dialect) -> bool:
    """Tell whether lines are rows rather than the text of one cell: nine of ten have all cells."""
    if header is None or len(header) < 2:
        return False
    counts: list[int] = []
    with suppress(csv.Error):  # the next quote that is not closed
        counts += (len(row) for row in csv.reader((text for *_, text in lines), dialect) if row)
    return 10 * counts.count(len(header)) >= 9 * max(1, len(counts))


def _make_document(header: list[str], row: list[str], as_data: bool) -> dict[str, Any]:
    """Return a row by column; empty cells are no value, and numbers are no text.

    Cells beyond the header are kept under the name "". as_data: numbers are kept, as text.
    """
    cells = [
        None if not cell or (not as_data and _NUMBER.fullmatch(cell)) else cell for cell in row
    ]
    document: dict[str, Any] = dict(zip(header, cells, strict=False))
    if surplus := cells[len(header) :]:
        document[""] = surplus
    return document
