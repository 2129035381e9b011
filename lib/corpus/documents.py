"""Takes documents from the readers and turns them into rows, and notes what gave none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

from lib.corpus import encoding
from lib.corpus.dedup import DIGEST_BYTES
from lib.corpus.parts import PartWriter
from lib.corpus.raw_file import LARGE_BYTES
from lib.corpus.scan import escape
from lib.corpus.tally import FAILURES, TRAIN, VALIDATION, Shape, Tally, format_problem

_FIELDS_COUNTED = 1000  # documents
_MOST_KEYS, _DEEPEST_KEY = 500, 8
SKIPPED_FILE, SKIPPED, DROPPED_REST = "file skipped", "document skipped", "rest of the file dropped"
DROPPED, DROPPED_ROWS, KEPT = "document dropped", "rows dropped", "kept"
TOO_LARGE = "too large", f"larger than {LARGE_BYTES:,} bytes, which is the limit for a document " \
                         "that is not plain text"


class Documents:
    """Collects the rows of several files into one part per split.

    parts: by split. errors: where the lines of errors.jsonl go. lines: how many JSON Lines the last
    file (or part of it) had. fallback: encoding of what is neither UTF-8 nor UTF-16, "" if
    that is replaced.
    """

    def __init__(self, shape: Shape, parts: dict[str, PartWriter], errors: BinaryIO) -> None:
        self.tally = Tally()
        self.lines = 0
        self.fallback = shape.fallback_encoding
        self._shape, self._parts, self._errors = shape, parts, errors
        self._train = parts[TRAIN]
        self._fields = Fields(shape.fields) if shape.fields else None
        self._joins = shape.strings == "joined"
        self._validation_below = int(shape.validation_percent / 100 * (1 << 64))
        self._hashes = bool(self._validation_below) or shape.dedup != "none"
        self._path = self._source = ""
        self._replaced_before = self._heard_before = self._short_before = 0
        self._fields_counted = 0  # documents whose other keys were looked at

    def begin(self, path: str, source: str) -> None:
        """Start a file. path: as errors.jsonl names it; source: as the column does."""
        self._path, self._source = path, escape(source)
        self._replaced_before, self._heard_before = self.tally.replaced, self._count_heard()
        self._short_before = self.tally.short

    def end(self, whole: bool) -> None:
        """Finish a file. whole: it was read from its start to its end, not a part of it."""
        if whole and self._count_heard() == self._heard_before:
            self.note("empty", "it holds no document", SKIPPED_FILE)
        if replaced := self.tally.replaced - self._replaced_before:
            instead = f"read as {self.fallback}" if self.fallback else "replaced by U+FFFD"
            self.note("encoding", f"what is not text was {instead} ({replaced} times)", KEPT)
        if short := self.tally.short - self._short_before:
            self.note("short", f"{short} rows of fewer characters than --min-chars",
                      DROPPED_ROWS)
        if self._fields:
            self.tally.fields_seen |= self._fields.seen

    def add_text(self, data: bytes) -> None:
        """Take a plain-text file as one document, as it is but for a byte order mark."""
        text = self.decode(data)
        if not text or text.isspace():
            self.note_blank()
            return
        self.tally.documents += 1
        self._row(text)

    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Take a document that lies in a file as valid UTF-8. size: in bytes. sha256: of it."""
        self.tally.documents += 1
        if characters < self._shape.min_chars:
            self.tally.short += 1
            return
        self._parts[self._split_of(sha256)].add_file(text, size, self._source,
                                                     sha256[-DIGEST_BYTES:])

    def note_blank(self) -> None:
        """Note a plain-text file without text."""
        self.note("empty", "it holds only white space", SKIPPED_FILE, 0, 1)

    def add_value(self, value: Any, offset: int | None = None, line: int | None = None,
                  number: int = 0) -> None:
        """Take a structured document.

        offset (bytes), line (from 1): where it starts. number: its place in the file, from 1,
        where neither is known.
        """
        self._count_fields([value])
        found = self._extract(value)
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
            self.note("no string", f"{where}no string with text in it{wanted}", SKIPPED, offset,
                      line)
            return
        self.tally.documents += 1
        for row in rows:
            self._row(row)

    def add_values(self, values: Sequence[Any]) -> bool:
        """Take structured documents that all give text, or return False and take none of them.

        The short way for clean input; what it refuses has to go through `add_value`.
        """
        found = [self._extract(value) for value in values]
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

    def _extract(self, value: Any) -> list[str]:
        return extract_strings(self._fields.select(value) if self._fields else value)

    def _count_fields(self, values: Sequence[Any]) -> None:
        """Note which keys beside --fields hold text, in some of the documents."""
        if self._fields:
            for value in values[:_FIELDS_COUNTED - self._fields_counted]:
                self._fields_counted += 1
                self.tally.other_fields.update(self._fields.find_others(value))

    def note(self, kind: str, message: str, action: str, offset: int | None = None,
             line: int | None = None) -> None:
        """Note a line of errors.jsonl for the file at hand."""
        self._errors.write(format_problem(self._path, offset, line, kind, message, action))
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

    def _count_heard(self) -> int:
        return self.tally.documents + sum(self.tally.problems.values())


class Fields:
    """Selects the dotted keys that `--fields` keeps; lists on the way are passed through.

    seen: those that some document had.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._ways = frozenset(name[:i] for name in names for i, c in enumerate(name) if c == ".")
        self.seen: set[str] = set()

    def select(self, value: Any) -> list[Any]:
        """Return the values under the kept keys, in the order of the document."""
        found: list[Any] = []
        stack = [("", value)]
        while stack:
            path, item = stack.pop()
            if path in self._names:
                self.seen.add(path)
                found.append(item)
            elif isinstance(item, list):
                stack.extend((path, element) for element in reversed(item))
            elif isinstance(item, dict) and (not path or path in self._ways):
                prefix = f"{path}." if path else ""
                stack.extend((f"{prefix}{key}", item[key]) for key in reversed(item))
        return found

    def find_others(self, value: Any) -> set[str]:
        """Return the dotted keys of a document that hold text and are not kept.

        It looks at no more than a few hundred, and at none that lie deep: nobody would read or type
        them.
        """
        found: set[str] = set()
        stack = [("", value, 0)]
        while stack and len(found) < _MOST_KEYS:
            path, item, depth = stack.pop()
            if isinstance(item, dict) and depth < _DEEPEST_KEY:
                prefix = f"{path}." if path else ""
                stack.extend((f"{prefix}{key}", element, depth + 1)
                             for key, element in item.items())
            elif isinstance(item, list):
                stack.extend((path, element, depth) for element in item)
            elif isinstance(item, str) and path and not item.isspace() and item:
                found.add(path)
        return {key for key in found
                if not any(key == name or key.startswith(f"{name}.") for name in self._names)}


def extract_strings(value: Any) -> list[str]:
    """Return every string value in nested dicts and lists, in order; keys are not values."""
    found: list[str] = []
    items: Iterator[Any] = iter(value.values() if type(value) is dict else (value,))
    stack: list[Iterator[Any]] = []  # no recursion: documents nest thousands of levels deep
    while True:
        for item in items:
            kind = type(item)  # parsers make no subclasses, and this is all that text is made of
            if kind is str:
                found.append(item)
            elif kind is dict or kind is list:
                stack.append(items)
                items = iter(item.values() if kind is dict else item)
                break
        else:
            if not stack:
                return found
            items = stack.pop()
