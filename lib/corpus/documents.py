"""Collect documents from the readers, and report documents and files that yield no row.

The subclasses write the rows: text_documents.py for text, chat_documents.py for chat datasets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from lib.core import units
from lib.core.paths import escape_path
from lib.corpus import encoding
from lib.corpus.dedup import DIGEST_BYTES
from lib.corpus.dropped import format_dropped
from lib.corpus.parts import Part
from lib.corpus.raw_file import LARGE_BYTES
from lib.corpus.row_options import TRAIN, VALIDATION, RowOptions
from lib.corpus.tally import Tally, format_problem

SKIPPED_FILE = "file skipped"
SKIPPED = "document skipped"
DROPPED_REST = "rest of the file dropped"
DROPPED = "document dropped"
TEST_DATA = "test data"  # a file that its name says is for testing
DROPPED_ROWS = "rows dropped"
SHORT = "short"  # kind of a row with too few characters
KEPT = "kept"
TOO_LARGE = (
    "too large",
    f"larger than {LARGE_BYTES:,} bytes, the limit for a structured document",
)


class RowFiles(NamedTuple):
    """The files with two values for each row of a split, which the search for duplicates reads.

    digests: the last bytes of the SHA-256 of its content. positions: its number in its file.
    """

    digests: BinaryIO
    positions: BinaryIO

    def add(self, sha256: bytes, position: int) -> None:
        """Write the values of the next row."""
        self.digests.write(sha256[-DIGEST_BYTES:])
        self.positions.write(position.to_bytes(8, "little"))


class Documents(ABC):
    """Collects the documents of several files.

    parts: one writer per split. errors, dropped: files for the lines of errors.jsonl and
    dropped.jsonl. row_files: by split, if rows that equal an earlier one are dropped. lines: number
    of JSON Lines in the last file or span. rows: number of rows in the current file or span,
    including dropped rows (if rows can be dropped). rows_of: by split, the number of rows after
    each file or span. fallback: encoding of bytes that are neither UTF-8 nor UTF-16, "" to replace
    them. extracts: kinds of documents whose text is extracted. extract_seconds: processor time that
    one extraction may take.

    as_data: if true, readers pass each document with its position and with values of all types; if
    false, they may omit positions and values that are not strings.
    """

    as_data = False

    def __init__(
        self,
        row_options: RowOptions,
        parts: Mapping[str, Part],
        errors: BinaryIO,
        dropped: BinaryIO,
        row_files: Mapping[str, RowFiles],
    ) -> None:
        self.tally = Tally()
        self.lines = 0
        self.rows = 0
        self.rows_of: dict[str, list[int]] = {split: [] for split in parts}
        self.fallback = row_options.fallback_encoding or ""
        self.extracts = frozenset(row_options.extract)
        self.extract_seconds = row_options.extract_seconds
        self._all_parts = parts
        self._errors = errors
        self._dropped = dropped
        self._row_files = row_files
        self._min_chars = row_options.min_chars
        self._validation_below = int(row_options.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below or row_files)
        self._named_split = ""  # the split that the name of the current file says
        self._path = ""
        self._source = ""
        self._replaced_before = 0
        self._reports_before = 0
        self._short_rows = 0  # of the current file

    def begin(self, path: str, source: str, role: str = "") -> None:
        """Start a file.

        path: its name in errors.jsonl. source: its name in the column `source`. role: the split
        that its name says; the rows of a file for validation are in the split `validation`.
        """
        self._named_split = VALIDATION if role == VALIDATION else ""
        self._path = path
        self._source = escape_path(source)
        self._replaced_before = self.tally.replaced
        self._reports_before = self._count_reports()
        self.rows = 0

    def end(self, is_whole: bool) -> None:
        """Finish a file or span. is_whole: whether the whole file was read, not a span of it."""
        if is_whole and self._count_reports() == self._reports_before:
            self.note("empty", "the file contains no document", SKIPPED_FILE)
        if replaced := self.tally.replaced - self._replaced_before:
            remedy = f"decoded as {self.fallback}" if self.fallback else "replaced by U+FFFD"
            self.note("encoding", f"invalid bytes were {remedy} ({replaced} times)", KEPT)
        if self._short_rows:
            text = f"{units.counted_are(self._short_rows, 'row')} shorter than --min-chars"
            self.note(SHORT, text, DROPPED_ROWS)
            self._short_rows = 0
        for split, part in self._all_parts.items():
            self.rows_of[split].append(part.rows)

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

    def is_column_wanted(self, name: str) -> bool:
        """Return whether to read a column of a table, if `as_data` is true."""
        return True

    def note_unread(self, name: str, count: int) -> None:  # noqa: B027
        """Count the rows of a column that is not read."""

    def finish(self) -> None:
        """Finish the parts. Call this after the last file."""
        for part in self._all_parts.values():
            part.finish()

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
        self.tally.note_problem(self._path, kind, message)

    def decode(self, data: bytes) -> str:
        """Return the text of some bytes of the file, and count the replacements in it."""
        text, replaced = encoding.decode_text(data, self.fallback)
        self.tally.replaced += replaced
        return text

    def _take_row(self, characters: int) -> bool:
        """Count the next row of the file; return whether it is long enough to be kept."""
        self.rows += 1
        if characters >= self._min_chars:
            return True
        self._short_rows += 1
        self.tally.short += 1
        self._dropped.write(format_dropped(self._path, self.rows, SHORT, characters, None))
        return False

    def _note_row(self, split: str, sha256: bytes) -> None:
        """Write what the search for duplicates needs to know of a kept row."""
        if self._row_files:
            self._row_files[split].add(sha256, self.rows)

    def _split_of(self, digest: bytes) -> str:
        """Return the split of a row, drawn from the digest of its text.

        The split of a text does not change if files are added or moved, and equal texts share it.
        """
        if self._named_split or not self._validation_below:
            return self._named_split or TRAIN
        draw = int.from_bytes(digest[:8], "big")
        return VALIDATION if draw < self._validation_below else TRAIN

    def _count_reports(self) -> int:
        """Return the number of documents and problems so far; a file that adds none is empty."""
        return self.tally.documents + sum(self.tally.problems.values())
