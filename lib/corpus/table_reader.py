"""CSV and TSV: the first row names the columns, then one document per row."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from typing import Any

from lib.corpus.documents import DROPPED, DROPPED_REST, TOO_LARGE, Documents
from lib.corpus.source import LARGE_BYTES, Source

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


class _Lines:
    """The decoded lines of a source, and where the last one started."""

    def __init__(self, source: Source, documents: Documents) -> None:
        self._lines, self._documents = source.lines(), documents
        self.offset: int | None = 0
        self.number = 0
        self.ended = True

    def __iter__(self) -> Iterator[str]:
        for offset, line in self._lines:
            self.offset = offset
            self.number += 1
            if line is None:
                self._documents.problem(*TOO_LARGE, DROPPED, offset, self.number)
                continue
            self.ended = line.endswith(b"\n")
            yield self._documents.decode(line)


def read_table(source: Source, documents: Documents) -> None:
    """Hand on one document per row; a row that is not CSV is dropped and the next one read."""
    csv.field_size_limit(LARGE_BYTES)
    lines = _Lines(source, documents)
    rows = csv.reader(lines, strict=True, delimiter="\t" if source.kind == "tsv" else ",")
    header: list[str] | None = None
    while True:
        number = lines.number + 1
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            documents.problem("syntax", f"not valid CSV: {error}", DROPPED, lines.offset, number)
            continue
        if source.damage and not lines.ended:
            break  # the last row is cut
        if header is None:
            header = row
        elif row:
            documents.value(_document(header, row), lines.offset, number)
    if source.damage:
        documents.problem("cut", source.damage, DROPPED_REST, lines.offset, lines.number)


def _document(header: list[str], row: list[str]) -> dict[str, Any]:
    """Return a row by column; numbers and empty cells are not strings.

    Cells beyond the header are kept under the name "".
    """
    cells = [None if not cell or _NUMBER.fullmatch(cell) else cell for cell in row]
    document: dict[str, Any] = dict(zip(header, cells, strict=False))
    if surplus := cells[len(header):]:
        document[""] = surplus
    return document
