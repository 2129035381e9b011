"""Collect documents from the readers, and report documents and files that yield no row.

The subclasses write the rows: text_documents.py for text, chat_documents.py for chat datasets. Rows
that are checked, measured or hashed wait in a queue until they fill a batch. Lines of errors.jsonl
wait in the same queue, so everything is written in the order of the input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

from lib.core import units
from lib.core.paths import escape_path
from lib.corpus import encoding, selection
from lib.corpus.dropped import format_dropped
from lib.corpus.parts import Part
from lib.corpus.raw_file import LARGE_BYTES
from lib.corpus.row_batch import RowBatch, RowText
from lib.corpus.row_options import TRAIN, VALIDATION, RowOptions
from lib.corpus.tally import Tally, format_problem
from lib.curate import row_tally, shingles
from lib.curate.masks.mask_options import make_masker

SKIPPED_FILE = "file skipped"
SKIPPED = "document skipped"
DROPPED_REST = "rest of the file dropped"
DROPPED = "document dropped"
TEST_DATA = "test data"  # a file that its name says is for testing
DROPPED_ROWS = "rows dropped"
KEPT = "kept"
TOO_LARGE = (
    "too large",
    f"larger than {LARGE_BYTES:,} bytes, the limit for a structured document",
)


class RowValues(NamedTuple):
    """Contains the values of a row that workers compute: one for each sidecar and extra column."""

    sidecars: Mapping[str, bytes]
    columns: Sequence[Any]


NO_VALUES = RowValues({}, ())


class _QueuedRow(NamedTuple):
    """Describes a row that waits for its batch. write: writes the row, given its values."""

    text: RowText
    sha256: bytes
    write: Callable[[RowValues], None]


class Documents(ABC):
    """Collects the documents of several files.

    parts: one writer per split. errors, dropped: files for the lines of errors.jsonl and
    dropped.jsonl. lines: number of JSON Lines in the last file or span. rows: number of rows in the
    current file or span, including dropped rows. rows_of: by split, the number of rows after each
    file or span. fallback: encoding of bytes that are neither UTF-8 nor UTF-16, "" to replace them.
    extracts: kinds of documents whose text is extracted. extract_seconds: processor time that one
    extraction may take.

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
    ) -> None:
        self.tally = Tally()
        self.lines = 0
        self.rows = 0
        self.rows_of: dict[str, list[int]] = {split: [] for split in parts}
        self.fallback = row_options.fallback_encoding or ""
        self.extracts = frozenset(row_options.extract)
        self.extract_seconds = row_options.extract_seconds
        self._row_options = row_options
        self._all_parts = parts
        self._errors = errors
        self._dropped = dropped
        self._rules = selection.start_rules(row_options)
        self._new_columns = selection.start_columns(row_options)
        self._sidecars = selection.list_sidecars(row_options)
        self._masker = make_masker(row_options)
        self._validation_below = int(row_options.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below or self._sidecars)
        self._queues = bool(self._hashes or self._rules or self._new_columns)
        self._named_split = ""  # the split that the name of the current file says
        self._path = ""
        self._raw_source = ""
        self._source = ""
        self._replaced_before = 0
        self._reports_before = 0
        self._sizes: list[int] = []  # bytes of each row of this file that does not enter the queue
        # Rows that wait, and functions to call between them.
        self._queue: list[_QueuedRow | Callable[[], None]] = []
        self._queued_characters = 0
        # Dropped rows of the current file, by kind and reason.
        self._dropped_of: Counter[tuple[str, str]] = Counter()

    def begin(self, path: str, source: str, role: str = "") -> None:
        """Start a file.

        path: its name in errors.jsonl. source: its name in the column `source`. role: the split
        that its name says; the rows of a file for validation are in the split `validation`.
        """
        self._named_split = VALIDATION if role == VALIDATION else ""
        self._path = path
        self._raw_source = source
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
        if self._sizes:
            self.tally.row_counts.add_rows(self._raw_source, self._sizes)
            self._sizes.clear()
        self._in_order(partial(self._end_rows, self._path))

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
        self._flush()
        for rule in self._rules:
            if rule.finish:
                rule.finish(self.tally)
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
        text = format_problem(self._path, offset, line, kind, message, action)
        self._in_order(partial(self._errors.write, text))
        self.tally.note_problem(self._path, kind, message)

    def decode(self, data: bytes) -> str:
        """Return the text of some bytes of the file, and count the replacements in it."""
        text, replaced = encoding.decode_text(data, self.fallback)
        self.tally.replaced += replaced
        return text

    def _make_row(
        self,
        strings: Sequence[str],
        characters: int | None = None,
        questions: Sequence[str] = (),
        size: int | None = None,
    ) -> RowText:
        """Return the text of the next row of the file, for rules and sidecars."""
        self.rows += 1
        return RowText(
            strings, self._path, self._raw_source, characters, self.rows, questions, size
        )

    def _add(self, text: RowText, sha256: bytes, write: Callable[[RowValues], None]) -> None:
        """Queue a row; `write` is called once its batch is complete, unless a rule drops it."""
        characters = text.characters
        if self._queued_characters + characters > shingles.BATCH_CHARACTERS:
            self._flush()
        self._queue.append(_QueuedRow(text, sha256, write))
        self._queued_characters += characters

    def _in_order(self, action: Callable[[], Any]) -> None:
        """Call a function after the rows before it are written."""
        if self._queue:
            self._queue.append(action)
        else:
            action()

    def _flush(self) -> None:
        """Write or drop the rows in the queue, and call the functions between them."""
        queue = self._queue
        self._queue = []
        self._queued_characters = 0
        batch = RowBatch([entry.text for entry in queue if isinstance(entry, _QueuedRow)])
        for name, compute in self._new_columns.items():
            batch.columns[name] = compute(batch)
        reasons = self._apply_rules(batch)
        self._count_rows(batch, reasons)
        sidecars = {
            name: sidecar.measure_batch(batch, self._row_options)
            for name, sidecar in self._sidecars.items()
            if sidecar.measure_batch
        }
        number = 0
        for entry in queue:
            if not isinstance(entry, _QueuedRow):
                entry()
                continue
            if number in reasons:
                self._dropped_of[reasons[number][:2]] += 1
            else:
                values = {
                    name: sidecars[name][number].tobytes()
                    if sidecar.measure is None
                    else sidecar.measure(entry.text, entry.sha256)
                    for name, sidecar in self._sidecars.items()
                }
                row_values = RowValues(
                    values, [column[number] for column in batch.columns.values()]
                )
                entry.write(row_values)
            number += 1

    def _apply_rules(self, batch: RowBatch) -> dict[int, tuple[str, str, Any]]:
        """Return the kind, reason and value of the first rule that drops each dropped row."""
        reasons: dict[int, tuple[str, str, Any]] = {}
        lines: dict[int, bytes] = {}
        for rule in self._rules if batch.rows else ():
            verdict = rule.check(batch)
            numbers = verdict.dropped.nonzero()[0].tolist()
            self.tally.alone[rule.kind] += len(numbers)
            for number in numbers:
                if number not in reasons:
                    reason = verdict.reasons[number] if len(verdict.reasons) else rule.reason
                    value = verdict.values[number] if len(verdict.values) else None
                    reasons[number] = rule.kind, reason, value
                    row = batch.rows[number]
                    lines[number] = format_dropped(row.path, row.position, rule.kind, value, None)
                    self.tally.dropped[rule.kind] += 1
        self._dropped.writelines(lines[number] for number in sorted(lines))
        return reasons

    def _count_rows(self, batch: RowBatch, reasons: Mapping[int, tuple[str, str, Any]]) -> None:
        """Count the rows of a batch for the report, and the rows that rules drop."""
        counts = self.tally.row_counts
        sizes = [row.bytes for row in batch.rows]
        for source, rows in groupby(range(len(sizes)), lambda row: batch.rows[row].source):
            numbers = list(rows)
            counts.add_rows(source, sizes[numbers[0] : numbers[-1] + 1])
        dropped: dict[tuple[str, str], list[int]] = {}
        for number, (kind, _, value) in reasons.items():
            row = batch.rows[number]
            dropped.setdefault((kind, row.source), []).append(sizes[number])
            key = row_tally.make_key(row.path, row.position)
            if counts.takes_sample(kind, key):
                text = self._masker.mask_text(row.text[: row_tally.READ_CHARACTERS])
                counts.add_sample(kind, key, row.path, row.position, value, text)
        for (kind, source), row_sizes in dropped.items():
            counts.drop_rows(kind, source, row_sizes)
        if languages := batch.columns.get("language"):
            counts.add_languages(Counter(languages))
            counts.add_languages(Counter(languages[number] for number in reasons), is_dropped=True)

    def _end_rows(self, path: str) -> None:
        """Note how many rows of a file or span were dropped, and where its rows end."""
        for (kind, reason), count in self._dropped_of.items():
            message = f"{units.counted_are(count, 'row')} {reason}"
            self._errors.write(format_problem(path, None, None, kind, message, DROPPED_ROWS))
            self.tally.problems[kind] += 1
        self._dropped_of.clear()
        for split, part in self._all_parts.items():
            self.rows_of[split].append(part.rows)

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
