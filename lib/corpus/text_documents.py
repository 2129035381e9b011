"""Convert documents to the rows of a text dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

from lib.corpus import conversations, encoding
from lib.corpus.documents import SKIPPED, Documents, RowFiles
from lib.corpus.parts import PartWriter
from lib.corpus.row_options import TRAIN, RowOptions

_FIELDS_COUNTED = 1000  # documents of a unit whose other keys are counted
_INSPECTED = 10  # documents of a file that are checked for conversations
_MOST_KEYS = 500
_DEEPEST_KEY = 8


class TextDocuments(Documents):
    """Writes one row per document, or one per string in it."""

    def __init__(
        self,
        row_options: RowOptions,
        parts: Mapping[str, PartWriter],
        errors: BinaryIO,
        dropped: BinaryIO,
        row_files: Mapping[str, RowFiles],
    ) -> None:
        super().__init__(row_options, parts, errors, dropped, row_files)
        self._parts = parts
        self._part = parts[TRAIN]  # for the rows of the current file, if they are not checked
        self._checks_rows = self._hashes or row_options.drops_rows
        self._fields = Fields(row_options.fields) if row_options.fields else None
        self._joins = row_options.strings == "joined"
        self._fields_counted = 0  # documents whose other keys were counted
        self._inspected = 0  # documents of the current file that were checked

    def begin(self, path: str, source: str, role: str = "") -> None:
        """Start a file."""
        super().begin(path, source, role)
        self._part = self._parts[self._named_split or TRAIN]
        self._inspected = 0

    def end(self, is_whole: bool) -> None:
        """Finish a file or span. is_whole: all of the file was read."""
        super().end(is_whole)
        if self._fields:
            self.tally.fields_seen |= self._fields.seen

    def add_text(self, data: bytes) -> None:
        """Add a plain-text file as one document, unchanged except for a byte order mark."""
        text = self.decode(data)
        if not text or text.isspace():
            self.note_blank()
            return
        self.tally.documents += 1
        self._add_row(text)

    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Add a large document from a file of valid UTF-8.

        size: in bytes. sha256: digest of the text.
        """
        self.tally.documents += 1
        if self._take_row(characters):
            split = self._split_of(sha256)
            self._parts[split].add_file(text, size, self._source)
            self._note_row(split, sha256)

    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Add a structured document.

        offset (bytes), line (from 1): start of the document. number: its position in the file,
        from 1, if offset and line are unknown.
        """
        self._inspect([value])
        strings = self._extract(value)
        if self._joins:
            text = strings[0] if len(strings) == 1 else "\n".join(strings)
            if text and not text.isspace():
                self.tally.documents += 1
                self._add_row(text)
                return
        rows = [row for row in strings if row and not row.isspace()]
        if not rows:
            prefix = f"document {number}: " if number else ""
            scope = " under --fields" if self._fields else ""
            self.note("no string", f"{prefix}no string with text{scope}", SKIPPED, offset, line)
            return
        self.tally.documents += 1
        for row in rows:
            self._add_row(row)

    def add_values(self, values: Sequence[Any]) -> bool:
        """Add structured documents if each of them yields text; otherwise return False.

        This is the fast path for clean input. If it returns False, it has added nothing, and the
        caller adds the documents one by one with `add_value`.
        """
        strings = [self._extract(value) for value in values]
        texts = list(map("\n".join, strings)) if self._joins else list(chain.from_iterable(strings))
        if not all(strings) or not all(texts) or any(map(str.isspace, texts)):
            return False
        try:
            rows = list(map(str.encode, texts))
        except UnicodeEncodeError:
            return False
        self._inspect(values)
        self.tally.documents += len(values)
        if self._checks_rows:
            for text in texts:
                self._add_row(text)
        else:
            self._part.extend(rows, self._source)
        return True

    def _extract(self, value: Any) -> list[str]:
        return extract_strings(self._fields.select(value) if self._fields else value)

    def _inspect(self, values: Sequence[Any]) -> None:
        """Count the conversations, or the keys with text that --fields does not select.

        The warnings report these counts. Only the first documents of a file or unit are inspected.
        """
        if not self._fields:
            for value in values[: _INSPECTED - self._inspected]:
                self._inspected += 1
                if name := conversations.detect_format(value):
                    self.tally.as_text[name] += conversations.is_conversation(value, name)
        else:
            for value in values[: _FIELDS_COUNTED - self._fields_counted]:
                self._fields_counted += 1
                self.tally.other_fields.update(self._fields.find_others(value))

    def _add_row(self, text: str) -> None:
        data, replaced = encoding.encode_text(text)
        self.tally.replaced += replaced
        if not self._checks_rows:
            self._part.add(data, self._source)
        elif self._take_row(len(text)):
            digest = hashlib.sha256(data).digest() if self._hashes else b""
            split = self._split_of(digest)
            self._parts[split].add(data, self._source)
            self._note_row(split, digest)


class Fields:
    """Selects the values under the dotted keys in `--fields`; keys also apply inside lists.

    seen: the keys that occurred in a document.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._prefixes = frozenset(
            name[:i] for name in names for i, c in enumerate(name) if c == "."
        )
        self.seen: set[str] = set()

    def select(self, value: Any) -> list[Any]:
        """Return the values under the selected keys, in the order of the document."""
        selected: list[Any] = []
        stack = [("", value)]
        while stack:
            path, item = stack.pop()
            if path in self._names:
                self.seen.add(path)
                selected.append(item)
            elif isinstance(item, list):
                stack.extend((path, element) for element in reversed(item))
            elif isinstance(item, dict) and (not path or path in self._prefixes):
                prefix = f"{path}." if path else ""
                stack.extend((f"{prefix}{key}", item[key]) for key in reversed(item))
        return selected

    def find_others(self, value: Any) -> set[str]:
        """Return the dotted keys of a document that contain text and are not selected.

        The number and the depth of the keys are limited, because they are printed as suggestions.
        """
        keys: set[str] = set()
        stack = [("", value, 0)]
        while stack and len(keys) < _MOST_KEYS:
            path, item, depth = stack.pop()
            if isinstance(item, dict) and depth < _DEEPEST_KEY:
                prefix = f"{path}." if path else ""
                stack.extend(
                    (f"{prefix}{key}", element, depth + 1) for key, element in item.items()
                )
            elif isinstance(item, list):
                stack.extend((path, element, depth) for element in item)
            elif isinstance(item, str) and path and not item.isspace() and item:
                keys.add(path)
        return {
            key
            for key in keys
            if not any(key == name or key.startswith(f"{name}.") for name in self._names)
        }


def extract_strings(value: Any) -> list[str]:
    """Return every string value in nested dicts and lists, in order, without the keys."""
    strings: list[str] = []
    items: Iterator[Any] = iter(value.values() if type(value) is dict else (value,))
    stack: list[Iterator[Any]] = []  # not recursive: documents may nest thousands of levels deep
    while True:
        for item in items:
            kind = type(item)  # faster than isinstance; parsers return no subclasses
            if kind is str:
                strings.append(item)
            elif kind is dict or kind is list:
                stack.append(items)
                items = iter(item.values() if kind is dict else item)
                break
        else:
            if not stack:
                return strings
            items = stack.pop()
