"""Collect documents from the readers, and report documents and files that yield no row.

The subclasses write the rows: text_documents.py for text, chat_documents.py for chat datasets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from lib.corpus import encoding, selection
from lib.corpus.raw_file import LARGE_BYTES
from lib.corpus.row_options import TRAIN, VALIDATION, RowOptions
from lib.corpus.scan import escape_path
from lib.corpus.selection import RowText
from lib.corpus.tally import FAILURES, Tally, format_problem

SKIPPED_FILE = "file skipped"
SKIPPED = "document skipped"
DROPPED_REST = "rest of the file dropped"
DROPPED = "document dropped"
DROPPED_ROWS = "rows dropped"
KEPT = "kept"
TOO_LARGE = (
    "too large",
    f"larger than {LARGE_BYTES:,} bytes, the limit for a structured document",
)


class Documents(ABC):
    """Collect the documents of several files.

    errors: file for the lines of errors.jsonl. lines: number of JSON Lines in the last file or
    span. rows: number of rows of the current file or span, before any are dropped. fallback:
    encoding of bytes that are neither UTF-8 nor UTF-16, "" to replace them. as_data: if true,
    readers pass each document with its position and with values of all types; if false, they may
    omit positions and values that are not strings. columns: the columns to read from a table, None
    for all columns with text.
    """

    as_data = False
    columns: frozenset[str] | None = None

    def __init__(self, row_options: RowOptions, errors: BinaryIO) -> None:
        self.tally = Tally()
        self.lines = 0
        self.rows = 0
        self.fallback = row_options.fallback_encoding or ""
        self._errors = errors
        self._rules = selection.list_rules(row_options)
        self._sidecars = selection.list_sidecars(row_options)
        self._validation_below = int(row_options.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below or self._sidecars)
        self._path = ""
        self._source = ""
        self._replaced_before = 0
        self._reports_before = 0
        self._dropped: Counter[tuple[str, str]] = Counter()  # of this file, by kind and reason

    def begin(self, path: str, source: str) -> None:
        """Start a file. path: for errors.jsonl. source: for the column `source`."""
        self._path = path
        self._source = escape_path(source)
        self._replaced_before = self.tally.replaced
        self._reports_before = self._count_reports()
        self._dropped.clear()
        self.rows = 0

    def end(self, is_whole: bool) -> None:
        """Finish a file or span. is_whole: all of the file was read."""
        if is_whole and self._count_reports() == self._reports_before:
            self.note("empty", "the file contains no document", SKIPPED_FILE)
        if replaced := self.tally.replaced - self._replaced_before:
            remedy = f"decoded as {self.fallback}" if self.fallback else "replaced by U+FFFD"
            self.note("encoding", f"invalid bytes were {remedy} ({replaced} times)", KEPT)
        for (kind, reason), count in self._dropped.items():
            self.note(kind, f"{count} rows are {reason}", DROPPED_ROWS)

    @abstractmethod
    def add_text(self, data: bytes) -> None:
        """Add a plain-text file."""

    @abstractmethod
    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Add a large plain text from a file of valid UTF-8.

        size: in bytes. sha256: digest of the text.
        """

    @abstractmethod
    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Add a structured document.

        offset (bytes), line (from 1): start of the document. number: its position in the file,
        from 1, if offset and line are unknown.
        """

    @abstractmethod
    def add_values(self, values: Sequence[Any]) -> bool:
        """Add structured documents if each of them yields a row; otherwise return False.

        This is the fast path for clean input. If it returns False, it has added nothing, and the
        caller adds the documents one by one with `add_value`.
        """

    @abstractmethod
    def finish(self) -> None:
        """Finish the parts; called after the last file."""

    def note_blank(self) -> None:
        """Report a plain-text file without text."""
        self.note("empty", "the file contains only white space", SKIPPED_FILE, 0, 1)

    def note(
        self,
        kind: str,
        message: str,
        action: str,
        offset: int | None = None,
        line: int | None = None,
    ) -> None:
        """Write a line to errors.jsonl for the current file."""
        self._errors.write(format_problem(self._path, offset, line, kind, message, action))
        self.tally.problems[kind] += 1
        if kind in FAILURES:
            self.tally.failed.add(self._path)

    def decode(self, data: bytes) -> str:
        """Return the text of some bytes of the file, and count the replacements in it."""
        text, replaced = encoding.decode_text(data, self.fallback)
        self.tally.replaced += replaced
        return text

    def _is_dropped(self, row: RowText) -> bool:
        """Return whether a rule drops a row; if so, count the row under the rule's reason."""
        for kind, find_reason, value in self._rules:
            if reason := find_reason(row, value):
                self.tally.dropped[kind] += 1
                self._dropped[kind, reason] += 1
                return True
        return False

    def _make_row(self, strings: Iterable[str], characters: int | None = None) -> RowText:
        """Return the text of the next row of the file, for rules and sidecars."""
        self.rows += 1
        return RowText(strings, characters, self.rows)

    def _measure(self, row: RowText, sha256: bytes) -> dict[str, Any]:
        """Return the values of a row for the sidecars."""
        return {name: sidecar.measure(row, sha256) for name, sidecar in self._sidecars.items()}

    def _split_of(self, digest: bytes) -> str:
        """Return the split of a row, drawn from the digest of its text.

        The split of a text does not change if files are added or moved, and equal texts share it.
        """
        if not self._validation_below:
            return TRAIN
        draw = int.from_bytes(digest[:8], "big")
        return VALIDATION if draw < self._validation_below else TRAIN

    def _count_reports(self) -> int:
        """Return the number of documents and problems so far; a file that adds none is empty."""
        return self.tally.documents + sum(self.tally.problems.values())
