"""Read CSV and TSV: the first row names the columns, each later row is a document."""

from __future__ import annotations

import csv
import re
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

from lib.core import units
from lib.corpus import table_format
from lib.corpus.documents import (
    DROPPED,
    DROPPED_REST,
    KEPT,
    SKIPPED_FILE,
    TOO_LARGE,
    Documents,
)
from lib.corpus.encoding import REPLACEMENT
from lib.corpus.kinds import MISMATCH
from lib.corpus.raw_file import LARGE_BYTES, RawFile
from lib.corpus.table_format import TableFormat

_LONG_ROW = 20  # lines
_MORE_LINES = 100  # that a row may have if it is read in another format
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_NUMBER_WITH_COMMA = re.compile(rf"{_NUMBER.pattern}|\s*[+-]?(\d+|\d{{1,3}}(\.\d{{3}})+),\d+\s*")
_MARK = "\ufeff"  # the byte order mark of a file that was appended to another
_NULL = "\\N"  # a null in a table of MySQL, PostgreSQL or Hive
_ERRORS = {  # by a word in the message of csv
    "expected after": "text follows a quote that closes a cell; a quote within a quoted cell is "
    "written twice",
    "unexpected end": "a quote is not closed",
    "new-line": "CR stands within a line, outside of quotes",
    "field larger": f"a cell is larger than {LARGE_BYTES:,} characters",
}


_Line = tuple[int | None, int, str]  # offset in bytes if known, number from 1, text with line end


class _Lines:
    """Decodes the lines of a file for csv.reader.

    row: lines of the current row. has_nul: whether any line so far contains a NUL character.
    last: the last line read.
    """

    def __init__(self, raw: RawFile, documents: Documents, ends_with_cr: bool) -> None:
        self._lines = raw.read_lines(ends_with_cr)
        self._documents = documents
        self._repeated: deque[_Line] = deque()
        self._number = 0
        self.row: list[_Line] = []
        self.has_nul = False
        self.last: _Line = (0, 0, "\n")

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._repeated:
            self.last = self._repeated.popleft()
        else:
            offset, line = next(self._lines)
            self._number += 1
            while line is None:
                self._documents.note(*TOO_LARGE, DROPPED, offset, self._number)
                offset, line = next(self._lines)
                self._number += 1
            try:
                text = line.decode().removeprefix(_MARK)
            except UnicodeDecodeError:
                text = self._documents.decode(line)
            self.last = offset, self._number, text
        self.row.append(self.last)
        text = self.last[2]
        if "\0" in text:
            self.has_nul = True
            return text.replace("\0", REPLACEMENT)  # csv of Python 3.10 refuses NUL
        return text

    def repeat_row(self) -> None:
        """Yield the lines of the row again."""
        self._repeated.extendleft(reversed(self.row))
        self.row = []


def read_table(raw: RawFile, documents: Documents) -> None:
    """Add one document per row; a row that is not valid CSV is dropped."""
    try:
        form = table_format.find_format(raw.head, raw.kind, documents.fallback)
    except table_format.UnclearTable as doubt:
        documents.note(MISMATCH, doubt.describe(raw.is_plain_text), SKIPPED_FILE)
        return
    if unusual := form.describe(raw.kind):
        documents.tally.table_formats[f"{raw.kind}: {unusual}"] += 1
    csv.field_size_limit(LARGE_BYTES)
    lines = _Lines(raw, documents, form.ends_with_cr)
    if form.has_marker:
        next(lines)
    rows = form.read_rows(lines)
    numbers = _NUMBER if form.separator in ("", ",") else _NUMBER_WITH_COMMA
    header: list[str] = []
    while True:
        lines.row = []
        error = ""
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as problem:
            row = []
            error = _describe_error(problem)
        if header and (error or len(row) != len(header) or len(lines.row) > 1):
            row, error = _read_again(lines, header, form, row, error)
        if lines.has_nul and not error and any("\0" in text for *_, text in lines.row):
            error = "it contains a NUL character"
            del lines.row[1:]
        if error:
            _drop_row(lines, header, form, f"not valid {raw.kind.upper()}: {error}", documents)
            if not header:
                return
        elif raw.damage and not lines.last[2].endswith("\n"):
            break  # the last row is cut
        elif not header:
            header = row
        elif row:
            offset, number, _ = lines.row[0]
            if len(lines.row) >= _LONG_ROW and _are_rows(lines.row[1:], header, form):
                documents.note(
                    "quote",
                    f"this row spans lines {number:,} to {lines.last[1]:,}, which look like "
                    "rows; it may contain an unclosed quote",
                    KEPT,
                    offset,
                    number,
                )
            if any(row[len(header) :]):
                documents.tally.long_rows += 1
            document = _make_document(header, row, numbers, documents.as_data)
            documents.add_value(document, offset, number)
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST, *lines.last[:2])


def _describe_error(error: csv.Error) -> str:
    """Return in other words what is wrong with a row."""
    message = str(error)
    return next((text for words, text in _ERRORS.items() if words in message), message)


def _read_again(
    lines: _Lines, header: list[str], form: TableFormat, row: list[str], error: str
) -> tuple[list[str], str]:
    """Return a row and its error, read in another format if only that fits the header."""
    texts = [text for *_, text in lines.row]
    is_valid = not error and len(row) == len(header)
    if is_valid and not (len(texts) > 1 and form.are_rows_without_quotes(texts, len(header))):
        return row, error
    for other in form.list_alternatives("".join(texts)):
        lines.repeat_row()
        with suppress(csv.Error, StopIteration):
            again = next(other.read_rows(islice(lines, len(texts) + _MORE_LINES)))
            if len(again) == len(header):
                return again, ""
    lines.repeat_row()
    for _ in texts:
        next(lines)
    return row, error


def _drop_row(
    lines: _Lines, header: list[str], form: TableFormat, message: str, documents: Documents
) -> None:
    """Report a row that is not valid, and the lines that are lost with it.

    An unclosed quote extends a row to the next quote, or to the end of the file. If the number of
    cells shows that these lines are rows, only the line with the quote is dropped. Without its
    header, nothing of a table can be read.
    """
    (offset, number, _), *rest = lines.row
    last = lines.last[1]
    if rest and _are_rows(rest, header, form):
        message += (
            f"; the unclosed quote spans {units.counted(len(rest), 'more line')}, up to line "
            f"{last:,}, which are read as rows"
        )
        del lines.row[0]
        lines.repeat_row()
    elif rest:
        message += (
            f"; lines {number:,} to {last:,} are lost because of a quote that opens in line "
            f"{number:,}, {units.counted(len(lines.row), 'line')} in all"
        )
        documents.tally.lines_lost += len(lines.row)
    if header:
        documents.note("syntax", message, DROPPED, offset, number)
    else:
        documents.note("syntax", f"the header is {message}", SKIPPED_FILE, offset, number)


def _are_rows(lines: list[_Line], header: list[str], form: TableFormat) -> bool:
    """Return whether lines are rows, not the text of one cell: 90 % are as long as `header`."""
    if len(header) < 2:
        return False
    counts: list[int] = []
    with suppress(csv.Error):  # raised at the next unclosed quote
        counts += (len(row) for row in form.read_rows(text for *_, text in lines) if row)
    return 10 * counts.count(len(header)) >= 9 * max(1, len(counts))


def _make_document(
    header: list[str], row: list[str], numbers: re.Pattern[str], as_data: bool
) -> dict[str, Any]:
    """Return a row as a dict by column name; empty cells, nulls and numbers become None.

    Cells of several columns without a name, and surplus cells, are kept as a list under the name
    "". numbers: pattern of numbers. as_data: keep numbers, as strings.
    """
    cells = [
        None if not cell or cell == _NULL or (not as_data and numbers.fullmatch(cell)) else cell
        for cell in row
    ]
    document: dict[str, Any] = dict(zip(header, cells, strict=False))
    surplus = cells[len(header) :]
    if surplus or header.count("") > 1:
        named = zip(header, cells, strict=False)
        document[""] = [*(cell for name, cell in named if not name), *surplus]
    return document
