"""Read CSV and TSV: the first row names the columns, each later row is a document."""

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


_Line = tuple[int | None, int, str]  # offset in bytes if known, number from 1, text with line end


class _Lines:
    """Decodes the lines of a file for csv.reader.

    row: lines of the current row. last: the last line read. repeated: lines to yield again before
    the next line of the file.
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
    """Add one document per row; a row that is not valid CSV is dropped."""
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
                    f"this row spans lines {number:,} to {lines.last[1]:,}, which look like "
                    "rows; it may contain an unclosed quote",
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
    """Report a row that is not valid CSV, and the lines that are lost with it.

    An unclosed quote extends a row to the next quote, or to the end of the file. If the number of
    cells shows that these lines are rows, only the line with the quote is dropped.
    """
    (offset, number, _), *rest = lines.row
    last = lines.last[1]
    message = f"not valid CSV: {error}"
    if rest and _are_rows(rest, header, dialect):
        message += (
            f"; the unclosed quote spans {units.counted(len(rest), 'more line')}, up to line "
            f"{last:,}, which are read as rows"
        )
        lines.repeated.extendleft(reversed(rest))
    elif rest:
        message += (
            f"; lines {number:,} to {last:,} are lost because of a quote that opens in line "
            f"{number:,}, {units.counted(len(lines.row), 'line')} in all"
        )
        documents.tally.lines_lost += len(lines.row)
    documents.note("syntax", message, DROPPED, offset, number)


def _are_rows(lines: list[_Line], header: list[str] | None, dialect: Dialect) -> bool:
    """Return whether lines are rows, not the text of one cell: 90 % are as long as `header`."""
    if header is None or len(header) < 2:
        return False
    counts: list[int] = []
    with suppress(csv.Error):  # raised at the next unclosed quote
        counts += (len(row) for row in csv.reader((text for *_, text in lines), dialect) if row)
    return 10 * counts.count(len(header)) >= 9 * max(1, len(counts))


def _make_document(header: list[str], row: list[str], as_data: bool) -> dict[str, Any]:
    """Return a row as a dict by column name; empty cells and numbers become None.

    Cells of several columns without a name, and surplus cells, are kept as a list under the name
    "". as_data: keep numbers, as strings.
    """
    cells = [
        None if not cell or (not as_data and _NUMBER.fullmatch(cell)) else cell for cell in row
    ]
    document: dict[str, Any] = dict(zip(header, cells, strict=False))
    surplus = cells[len(header) :]
    if surplus or header.count("") > 1:
        named = zip(header, cells, strict=False)
        document[""] = [*(cell for name, cell in named if not name), *surplus]
    return document
