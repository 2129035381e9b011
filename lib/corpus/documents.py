"""Takes documents from the readers and turns them into rows, and notes what gave none."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO

from lib.corpus import encoding, strings
from lib.corpus.dedup import DIGEST_BYTES
from lib.corpus.parts import Part
from lib.corpus.scan import shown
from lib.corpus.source import LARGE_BYTES

TRAIN, VALIDATION = "train", "validation"
_FIELDS_COUNTED = 1000  # documents
SKIPPED_FILE, SKIPPED, DROPPED_REST = "file skipped", "document skipped", "rest of the file dropped"
DROPPED, DROPPED_ROWS, KEPT = "document dropped", "rows dropped", "kept"
TOO_LARGE = "too large", f"larger than {LARGE_BYTES:,} bytes, which is the limit for a document " \
                         "that is not plain text"
# Problems by which a file counts as failed; of the others it simply holds no (clean) text.
FAILURES = {"syntax", "unreadable", "unsupported", "nesting", "aliases", "cut", "crash",
            "too large"}


@dataclass(frozen=True)
class Shape:
    """How documents become rows: the options of stage 02 that readers and rows depend on."""

    fields: tuple[str, ...] = ()
    strings: str = "joined"
    min_chars: int = 0
    validation_percent: float = 0.0
    keep_source: bool = False
    dedup: str = "none"
    fallback_encoding: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)


@dataclass
class Tally:
    """What became of some input.

    other_fields: how many documents have text under keys that --fields does not name, of the first
    thousand of each unit.
    """

    documents: int = 0
    short: int = 0
    replaced: int = 0
    lines_lost: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    fields_seen: set[str] = field(default_factory=set)
    other_fields: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add what became of other input."""
        self.documents += other.documents
        self.short += other.short
        self.replaced += other.replaced
        self.lines_lost += other.lines_lost
        self.problems += other.problems
        self.failed |= other.failed
        self.fields_seen |= other.fields_seen
        self.other_fields += other.other_fields

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return vars(self) | {"failed": sorted(self.failed), "fields_seen": sorted(self.fields_seen)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """Return what `to_json` was made of."""
        return cls(**value | {"problems": Counter(value["problems"]), "failed": {*value["failed"]},
                              "fields_seen": {*value["fields_seen"]},
                              "other_fields": Counter(value.get("other_fields", {}))})


def problem_line(path: str, offset: int | None, line: int | None, kind: str, message: str,
                 action: str) -> bytes:
    """Return a line of errors.jsonl."""
    return json.dumps({"path": path, "offset": offset, "line": line, "kind": kind,
                       "message": message, "action": action}).encode() + b"\n"


class Documents:
    """Collects the rows of several files into one part per split.

    parts: by split. errors: where the lines of errors.jsonl go. lines: of JSON Lines, how many the
    last file (or part of it) had. fallback: encoding of what is neither UTF-8 nor UTF-16, "" if
    that is replaced.
    """

    def __init__(self, shape: Shape, parts: dict[str, Part], errors: BinaryIO) -> None:
        self.tally = Tally()
        self.lines = 0
        self.fallback = shape.fallback_encoding
        self._shape, self._parts, self._errors = shape, parts, errors
        self._train = parts[TRAIN]
        self._fields = strings.Fields(shape.fields) if shape.fields else None
        self._joins = shape.strings == "joined"
        self._validation_below = int(shape.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below) or shape.dedup != "none"
        self._path = self._source = ""
        self._replaced_before = self._heard_before = self._short_before = 0
        self._fields_counted = 0  # documents whose other keys were looked at

    def begin(self, path: str, source: str) -> None:
        """Start a file. path: as errors.jsonl names it; source: as the column does."""
        self._path, self._source = path, shown(source)
        self._replaced_before, self._heard_before = self.tally.replaced, self._heard()
        self._short_before = self.tally.short

    def end(self, whole: bool) -> None:
        """Finish a file. whole: it was read from its start to its end, not a part of it."""
        if whole and self._heard() == self._heard_before:
            self.problem("empty", "it holds no document", SKIPPED_FILE)
        if replaced := self.tally.replaced - self._replaced_before:
            instead = f"read as {self.fallback}" if self.fallback else "replaced by U+FFFD"
            self.problem("encoding", f"what is not text was {instead} ({replaced} times)", KEPT)
        if short := self.tally.short - self._short_before:
            self.problem("short", f"{short} rows of fewer characters than --min-chars",
                         DROPPED_ROWS)
        if self._fields:
            self.tally.fields_seen |= self._fields.seen

    def text(self, data: bytes) -> None:
        """Take a plain-text file as one document, as it is but for a byte order mark."""
        text = self.decode(data)
        if not text or text.isspace():
            self.blank()
            return
        self.tally.documents += 1
        self._row(text)

    def large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Take a document that lies in a file as valid UTF-8. size: in bytes. sha256: of it."""
        self.tally.documents += 1
        if characters < self._shape.min_chars:
            self.tally.short += 1
            return
        self._parts[self._split_of(sha256)].add_file(text, size, self._source,
                                                     sha256[-DIGEST_BYTES:])

    def blank(self) -> None:
        """Note a plain-text file without text."""
        self.problem("empty", "it holds only white space", SKIPPED_FILE, 0, 1)

    def value(self, value: Any, offset: int | None = None, line: int | None = None,
              number: int = 0) -> None:
        """Take a structured document.

        offset (bytes), line (from 1): where it starts. number: its place in the file, from 1,
        where neither is known.
        """
        self._count_fields([value])
        found = self._strings(value)
        if self._joins:
            text = found[0] if len(found) == 1 else "\n".join(found)
            if text and not text.isspace():
                self.tally.documents += 1
                self._row(text)
                return
        rows = [row for row in found if row and not row.isspace()]
        if not rows:
            where = f"document {number}: " if number else ""
            wanted = " under --fields" if self._fields else ""
            self.problem("no string", f"{where}no string with text in it{wanted}", SKIPPED, offset,
                         line)
            return
        self.tally.documents += 1
        for row in rows:
            self._row(row)

    def values(self, values: Sequence[Any]) -> bool:
        """Take structured documents that all give text, or return False and take none of them.

        The short way for clean input; what it refuses has to go through `value`.
        """
        found = [self._strings(value) for value in values]
        texts = list(map("\n".join, found)) if self._joins else list(chain.from_iterable(found))
        if not all(found) or not all(texts) or any(map(str.isspace, texts)):
            return False
        try:
            rows = list(map(str.encode, texts))
        except UnicodeEncodeError:
            return False
        self._count_fields(values)
        self.tally.documents += len(values)
        if self._hashes or self._shape.min_chars:
            for text in texts:
                self._row(text)
        else:
            self._train.extend(rows, self._source)
        return True

    def _strings(self, value: Any) -> list[str]:
        return strings.strings_of(self._fields.select(value) if self._fields else value)

    def _count_fields(self, values: Sequence[Any]) -> None:
        """Note which keys beside --fields hold text, in some of the documents."""
        if self._fields:
            for value in values[:_FIELDS_COUNTED - self._fields_counted]:
                self._fields_counted += 1
                self.tally.other_fields.update(self._fields.others(value))

    def problem(self, kind: str, message: str, action: str, offset: int | None = None,
                line: int | None = None) -> None:
        """Note a line of errors.jsonl for the file at hand."""
        self._errors.write(problem_line(self._path, offset, line, kind, message, action))
        self.tally.problems[kind] += 1
        if kind in FAILURES:
            self.tally.failed.add(self._path)

    def decode(self, data: bytes) -> str:
        """Return the text of some bytes of the file, counting replacements."""
        text, replaced = encoding.decode(data, self.fallback)
        self.tally.replaced += replaced
        return text

    def _row(self, text: str) -> None:
        if len(text) < self._shape.min_chars:
            self.tally.short += 1
            return
        data, replaced = encoding.encode(text)
        self.tally.replaced += replaced
        if not self._hashes:
            self._train.add(data, self._source)
            return
        digest = hashlib.sha256(data).digest()
        self._parts[self._split_of(digest)].add(data, self._source, digest[-DIGEST_BYTES:])

    def _split_of(self, digest: bytes) -> str:
        """Draw the split from the text alone, so it stays when files are added, moved or equal."""
        if not self._validation_below:
            return TRAIN
        draw = int.from_bytes(digest[:8], "big")
        return VALIDATION if draw < self._validation_below else TRAIN

    def _heard(self) -> int:
        return self.tally.documents + sum(self.tally.problems.values())
