"""Takes documents from the readers, and notes what gave no row.

Text datasets (text_documents.py) and chat datasets (chat_documents.py) make rows of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, BinaryIO

from lib.corpus import encoding
from lib.corpus.raw_file import LARGE_BYTES
from lib.corpus.scan import escape_path
from lib.corpus.tally import FAILURES, TRAIN, VALIDATION, RowOptions, Tally, format_problem

SKIPPED_FILE = "file skipped"
SKIPPED = "document skipped"
DROPPED_REST = "rest of the file dropped"
DROPPED = "document dropped"
DROPPED_ROWS = "rows dropped"
KEPT = "kept"
TOO_LARGE = (
    "too large",
    f"larger than {LARGE_BYTES:,} bytes, which is the limit for a document that is not plain text",
)


class Documents(ABC):
    """Collects the rows of several files.

    errors: where the lines of errors.jsonl go. lines: how many JSON Lines the last
    file (or part of it) had. fallback: encoding of what is neither UTF-8 nor UTF-16, "" if
    that is replaced. as_data: whether readers hand on each document alone, with its place and with
    all that is in it, numbers too, and not for its strings. columns: which of a table are wanted,
    None for all that hold text.
    """

    as_data = False
    columns: frozenset[str] | None = None

    def __init__(self, row_options: RowOptions, errors: BinaryIO) -> None:
        self.tally = Tally()
        self.lines = 0
        self.fallback = row_options.fallback_encoding
        self._row_options = row_options
        self._errors = errors
        self._validation_below = int(row_options.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below) or row_options.dedup != "none"
        self._path = ""
        self._source = ""
        self._replaced_before = 0
        self._heard_before = 0
        self._short_before = 0

    def begin(self, path: str, source: str) -> None:
        """Start a file. path: as errors.jsonl names it; source: as the column does."""
        self._path = path
        self._source = escape_path(source)
        self._replaced_before = self.tally.replaced
        self._heard_before = self._count_heard()
        self._short_before = self.tally.short

    def end(self, whole: bool) -> None:
        """Finish a file. whole: it was read from its start to its end, not a part of it."""
        if whole and self._count_heard() == self._heard_before:
            self.note("empty", "it holds no document", SKIPPED_FILE)
        if replaced := self.tally.replaced - self._replaced_before:
            instead = f"read as {self.fallback}" if self.fallback else "replaced by U+FFFD"
            self.note("encoding", f"what is not text was {instead} ({replaced} times)", KEPT)
        if short := self.tally.short - self._short_before:
            self.note("short", f"{short} rows of fewer characters than --min-chars", DROPPED_ROWS)

    @abstractmethod
    def add_text(self, data: bytes) -> None:
        """Take a plain-text file."""

    @abstractmethod
    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Take a plain text that lies in a file as valid UTF-8. size: in bytes. sha256: of it."""

    @abstractmethod
    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Take a structured document.

        offset (bytes), line (from 1): where it starts. number: its place in the file, from 1,
        where neither is known.
        """

    @abstractmethod
    def add_values(self, values: Sequence[Any]) -> bool:
        """Take structured documents that all give a row, or return False and take none of them.

        The short way for clean input; what it refuses has to go through `add_value`.
        """

    @abstractmethod
    def finish(self) -> None:
        """Finish the parts, after the last file."""

    def note_blank(self) -> None:
        """Note a plain-text file without text."""
        self.note("empty", "it holds only white space", SKIPPED_FILE, 0, 1)

    def note(
        self,
        kind: str,
        message: str,
        action: str,
        offset: int | None = None,
        line: int | None = None,
    ) -> None:
        """Note a line of errors.jsonl for the file at hand."""
        self._errors.write(format_problem(self._path, offset, line, kind, message, action))
        self.tally.problems[kind] += 1
        if kind in FAILURES:
            self.tally.failed.add(self._path)

    def decode(self, data: bytes) -> str:
        """Return the text of some bytes of the file, counting replacements."""
        text, replaced = encoding.decode_text(data, self.fallback)
        self.tally.replaced += replaced
        return text

    def _split_of(self, digest: bytes) -> str:
        """Draw the split from the text alone, so it stays when files are added, moved or equal."""
        if not self._validation_below:
            return TRAIN
        draw = int.from_bytes(digest[:8], "big")
        return VALIDATION if draw < self._validation_below else TRAIN

    def _count_heard(self) -> int:
        return self.tally.documents + sum(self.tally.problems.values())
