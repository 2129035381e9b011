"""Find out by the first bytes of a table which separator, quotes and line ends it uses."""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from lib.corpus import encoding
from lib.corpus.kinds import HEAD_BYTES

if TYPE_CHECKING:
    from _csv import _reader as Reader

SEPARATORS = {"csv": ",", "tsv": "\t"}  # by kind of file
_SEPARATORS = ";\t|,"
# Characters in a header that suggest another separator, which only a line `sep=` can name.
_ODD_SEPARATOR = re.compile(r"[^\w\s\"'().\[\]\\-]")
# Text rarely contains these separators, so a quote that does not enclose a cell is text.
_SAFE_SEPARATORS = ("\t", "|", "")
_NO_SEPARATOR = "\x1f"  # of a table with one column: a character that no text contains
_NEARLY_ALL = 0.9  # share of the rows that another separator must fit
_ENOUGH = 0.5  # share of the rows that the usual separator must fit
_MIN_ROWS = 10  # that show that the header is wrong or misread
_MIN_CELLS = 10  # beyond those of the header, in rows of equal length
_MARKER = re.compile(r"\"?sep=(\\t|[^\"'\\\r\n])?\"?[ \t]*(?:\r?\n|\r|$)", re.IGNORECASE)
_NO_DECIMAL = re.compile(r"(?<!\d),|,(?!\d)")  # a comma that is no decimal comma
_NAME = re.compile(r"[^\W\d]\w*")  # of a column
_LINE_END = re.compile(r"[\r\n]+")
_QUOTED = re.compile(r'"[^"]*(?:"|$)')


class UnclearTable(Exception):
    """Says why the separator of a table is unclear, and what to do.

    separator: "" for a table with one column; a first line may name it.
    """

    def __init__(self, message: str, separator: str) -> None:
        super().__init__(message)
        self._mark = f"sep={separator}".replace("\t", "\\t")

    def describe(self, is_text: bool) -> str:
        """Return the message. is_text: whether a text editor can change the file as it is."""
        escaped = self._mark.replace("\\", "\\\\")
        command = f" (`sed -i '1i {escaped}' FILE`)" if is_text else ""
        return f"{self}, put the line `{self._mark}` before the header{command}"


@dataclass(frozen=True)
class TableFormat:
    """Describes how a table is written.

    separator: "" for a table with one column. quote: "" if quotes are text. escapes: whether a
    backslash before a quote, a separator, a line end or a backslash makes it text. skips_space:
    whether spaces after a separator are no part of the cell. ends_with_cr: whether lines end with
    CR alone. has_marker: whether the first line names the separator and is no row.
    """

    separator: str
    quote: str = '"'
    escapes: bool = False
    skips_space: bool = False
    ends_with_cr: bool = False
    has_marker: bool = False

    def read_rows(self, lines: Iterable[str]) -> Reader:
        """Return a csv.reader of lines in this format."""
        if self.escapes:
            # csv drops a backslash before any character, so backslashes that are text are doubled.
            pattern = _find_backslashes(self.quote, self.separator)
            lines = map(partial(pattern.sub, lambda match: match[1] or r"\\"), lines)
        return csv.reader(
            lines,
            strict=True,
            delimiter=self.separator or _NO_SEPARATOR,
            quotechar=self.quote or None,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            escapechar="\\" if self.escapes else None,
            skipinitialspace=self.skips_space,
        )

    def list_alternatives(self, text: str) -> Iterator[TableFormat]:
        """Yield other formats for a row with this text, if the row does not fit the header."""
        if self.finds_escapes(text):
            yield replace(self, escapes=not self.escapes)
        if self.is_safe and self.quote in text:
            yield replace(self, quote="")

    @property
    def is_safe(self) -> bool:
        """Return whether cells rarely contain the separator, so that quotes are not needed."""
        return self.separator in _SAFE_SEPARATORS

    def finds_escapes(self, text: str) -> bool:
        """Return whether a text contains a backslash that may be an escape."""
        return any(f"\\{character}" in text for character in f"{self.quote}{self.separator}\r\n")

    def are_rows_without_quotes(self, lines: Sequence[str], columns: int) -> bool:
        """Return whether lines that quotes join look like rows: text rarely contains tabs."""
        return self.separator == "\t" and all(
            line.count("\t") == columns - 1 and not line.startswith("\t") for line in lines
        )

    def describe(self, kind: str) -> str:
        """Return what is unusual about the format for a kind of files, "" if nothing is."""
        unusual = {
            f"{name_separator(self.separator)} as separator": self.separator
            not in ("", SEPARATORS[kind]),
            "single quotes": self.quote == "'",
            "backslashes before quotes": self.escapes,
            "CR as line end": self.ends_with_cr,
        }
        return " and ".join(text for text, is_used in unusual.items() if is_used)


@cache
def _find_backslashes(quote: str, separator: str) -> re.Pattern[str]:
    """Return a pattern for backslashes; its group is empty for a backslash that is text."""
    escaped = re.escape("\\" + quote + separator)
    return re.compile(rf"(\\[{escaped}\r\n])|\\")


def name_separator(separator: str) -> str:
    """Return how messages call a separator."""
    return "a tab" if separator == "\t" else f'"{separator}"'


class _Reading(NamedTuple):
    """Contains the complete rows of a head, read in one format.

    A row that is invalid is None, or has cells without quotes. invalid: number of such rows.
    """

    form: TableFormat
    header: list[str]
    rows: list[list[str] | None]
    invalid: int

    @property
    def columns(self) -> int:
        """Return the number of cells of the header."""
        return len(self.header)

    @property
    def share(self) -> float:
        """Return the share of the rows that have as many cells as the header, or empty ones more.

        It is 1 for a header without rows.
        """
        fits = sum(
            row is not None and len(row) >= self.columns and not any(row[self.columns :])
            for row in self.rows
        )
        return fits / len(self.rows) if self.rows else float(self.columns > 0)

    def splits_rows(self) -> bool:
        """Return whether a tenth of the rows contains the separator, or there is no row."""
        count = sum(row is None or len(row) > 1 for row in self.rows)
        return count >= (1 - _NEARLY_ALL) * len(self.rows)

    def contains_escapes(self, form: TableFormat) -> bool:
        """Return whether more rows would change by the escapes of a format than do not fit yet."""
        fitting = [row for row in self.rows if row and len(row) == self.columns]
        changes = sum(any(map(form.finds_escapes, row)) for row in fitting)
        return changes > len(self.rows) - len(fitting)

    def encloses(self, quote: str) -> bool:
        """Return whether all cells of the header or of some column begin and end with a quote."""
        fitting = [row for row in self.rows if row and len(row) == self.columns]
        for cells in (self.header, *zip(*fitting, strict=True)):
            texts = [cell.strip() for cell in cells if cell.strip()]
            is_enclosed = all(len(text) > 1 and text[0] == quote == text[-1] for text in texts)
            if is_enclosed and (len(texts) > 1 or (texts and cells is self.header)):
                return True
        return False


def find_format(head: bytes, kind: str, fallback: str = "") -> TableFormat:
    """Return the format of a table.

    head: the first bytes of the file. kind: `csv` or `tsv`. fallback: as for `decode_text`. Raises
    UnclearTable if the table would be read wrongly with the usual separator, and no other is sure.
    """
    usual = TableFormat(SEPARATORS[kind])
    text, _ = encoding.decode_text(encoding.drop_cut_character(head), fallback)
    if marker := _MARKER.match(text):
        separator = (marker[1] or "").replace("\\t", "\t")
        usual = replace(usual, separator=separator, has_marker=True)
        text = text[marker.end() :]
    end = _LINE_END.search(_QUOTED.sub("", text)) if "\r" in text else None
    if end and "\n" not in end[0]:
        usual = replace(usual, ends_with_cr=True)
        text = text.replace("\r", "\n")
    is_cut = len(head) >= HEAD_BYTES
    reading = _read_best(text, usual, is_cut)
    if marker:
        return reading.form
    header = text.lstrip("\r\n").split("\n", 1)[0]
    fewest = reading.columns if reading.share >= _ENOUGH else 1  # separators in the header
    others = [
        _read_best(text, replace(usual, separator=separator), is_cut)
        for separator in _SEPARATORS
        if separator != usual.separator and header.count(separator) >= fewest
    ]
    others.sort(key=lambda other: (other.columns > 1, other.share, other.columns), reverse=True)
    if others and others[0].columns > 1:
        best = others[0]
        is_surely_usual = reading.share >= _NEARLY_ALL and not _has_decimal_commas(text, usual)
        if best.share >= _NEARLY_ALL and (
            reading.share < _ENOUGH
            or (best.columns > reading.columns and not (reading.columns > 1 and is_surely_usual))
        ):
            return best.form
        if reading.columns == 1 and best.splits_rows():
            raise _describe_doubt(reading, best)
    if reading.columns == 1:
        return _read_one_column(text, reading, is_cut)
    longer = sum(bool(any((row or ())[reading.columns :])) for row in reading.rows)
    if reading.header and longer >= _MIN_ROWS and longer > (1 - _ENOUGH) * len(reading.rows):
        raise UnclearTable(
            f"the header has {reading.columns} columns, but {longer:,} of the first "
            f"{len(reading.rows):,} rows have more cells; name all columns in the header, or "
            f"enclose values that contain {name_separator(usual.separator)} in quotes; to read the "
            "rows as they are",
            usual.separator,
        )
    return reading.form


def _has_decimal_commas(text: str, usual: TableFormat) -> bool:
    """Return whether the usual separator is a comma that the rows use in numbers alone."""
    rows = text.lstrip("\n").partition("\n")[2]
    return usual.separator == "," and not _NO_DECIMAL.search(rows)


def _read_one_column(text: str, usual: _Reading, is_cut: bool) -> TableFormat:
    """Return the format of a table whose header has one column in every format."""
    form = usual.form
    if usual.share == 1 and any(len(row or ()) > 1 for row in usual.rows):
        return form  # separators at the ends of the lines
    header = text.lstrip("\n").split("\n", 1)[0]
    for separator in dict.fromkeys(_ODD_SEPARATOR.findall(header[1:-1])):
        reading = _read_best(text, replace(form, separator=separator), is_cut)
        if reading.columns > 1 and reading.rows and reading.share >= _NEARLY_ALL:
            raise _describe_doubt(usual, reading)
    single = _read_best(text, replace(form, separator=""), is_cut)
    inner = "\n".join(row[0] for row in (single.header, *single.rows) if row)
    for separator in _SEPARATORS:
        name = name_separator(separator)
        rows = _read_best(text, replace(form, separator=separator), is_cut).rows
        [(columns, count)] = Counter(map(_count_cells, rows)).most_common(1) or [(0, 0)]
        if (form.separator, separator, columns) == ("\t", ",", 2):
            continue  # a comma in each row, as in "Paris, France"
        names = (rows[0] if rows else None) or [""]
        is_header = all(map(_NAME.fullmatch, names)) and not _NAME.fullmatch(header)
        is_sure = is_header or count * (columns - 1) >= _MIN_CELLS
        if columns > 1 and is_sure and count >= _NEARLY_ALL * len(rows):
            raise UnclearTable(
                f"the first line has one column, but {count:,} of the next {len(rows):,} rows have "
                f"{columns} with {name} as separator; delete the lines before the header, or name "
                "all columns there; if there is only one column",
                "",
            )
        enclosed = _read_best(inner, replace(form, separator=separator), is_cut)
        if enclosed.columns > 1 and enclosed.rows and enclosed.share >= _NEARLY_ALL:
            raise UnclearTable(
                f"each line is a single cell in quotes, which contains {enclosed.columns} cells "
                f"with {name} as separator; remove the outer quotes; if there is only one column",
                "",
            )
    return single.form


def _count_cells(row: Sequence[str] | None) -> int:
    """Return the number of cells of a row up to the last one with text."""
    return max((number for number, cell in enumerate(row or (), 1) if cell), default=0)


def _describe_doubt(usual: _Reading, other: _Reading) -> UnclearTable:
    name = name_separator(other.form.separator)
    return UnclearTable(
        f"the header has one column with {name_separator(usual.form.separator)} as separator, and "
        f"{other.columns} with {name}, as {100 * other.share:.0f} % of the first rows have; if "
        f"{name} is right",
        other.form.separator,
    )


def _read_best(text: str, form: TableFormat, is_cut: bool) -> _Reading:
    """Return the reading with the quotes and escapes that fit most rows."""
    best = _read_head(text, form, is_cut)
    for style in _list_styles(text, form):
        reading = _read_head(text, style, is_cut)
        if style.escapes and best.contains_escapes(style):
            continue
        is_other_quote = style.skips_space or style.quote != form.quote
        if (reading.share, -reading.invalid) > (best.share, -best.invalid) or (
            is_other_quote
            and (reading.share, reading.columns) == (best.share, best.columns)
            and best.encloses(style.quote)
        ):
            best = reading
    return best


def _list_styles(text: str, form: TableFormat) -> Iterator[TableFormat]:
    """Yield other quotes and escapes that the text may use."""
    forms = [form]
    if form.separator != " " and f'{form.separator} "' in text:
        forms.append(replace(form, skips_space=True))
    if f"{form.separator}'" in text or "\n'" in text:
        forms.append(replace(form, quote="'"))
    yield from forms[1:]
    for other in forms:
        if other.finds_escapes(text):
            yield replace(other, escapes=True)


class _HeadLines:
    """Yields the lines of a text. row: the lines since it was cleared."""

    def __init__(self, text: str) -> None:
        self.left = deque(text.split("\n"))
        self.row: list[str] = []

    def __iter__(self) -> _HeadLines:
        return self

    def __next__(self) -> str:
        if not self.left:
            raise StopIteration
        self.row.append(self.left.popleft())
        return f"{self.row[-1]}\n"


def _read_head(text: str, form: TableFormat, is_cut: bool) -> _Reading:
    """Return the rows of a text. is_cut: whether the last row may be incomplete."""
    lines = _HeadLines(text)
    rows: list[list[str] | None] = []
    invalid = 0
    reader = form.read_rows(lines)
    while True:
        lines.row.clear()
        try:
            row = next(reader, None)
        except csv.Error:
            invalid += 1
            first, *rest = lines.row
            cells = first.split(form.separator) if form.separator else [first]
            rows.append(cells if form.is_safe else None)
            if lines.left or not is_cut:  # a quote is not closed, and the other lines may be rows
                lines.left.extendleft(reversed(rest))
            continue
        if row is None:
            break
        if row:
            rows.append(row)
    if is_cut and len(rows) > 1:
        rows.pop()
    return _Reading(form, (rows[0] if rows else None) or [], rows[1:], invalid)
