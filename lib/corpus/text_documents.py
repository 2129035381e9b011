"""Turns documents into rows of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

from lib.corpus import conversations, encoding
from lib.corpus.dedup import DIGEST_BYTES
from lib.corpus.documents import SKIPPED, Documents
from lib.corpus.parts import PartWriter
from lib.corpus.tally import TRAIN, RowOptions

_FIELDS_COUNTED = 1000  # documents of a unit
_LOOKED_AT = 10  # documents of a file
_MOST_KEYS = 500
_DEEPEST_KEY = 8


class TextDocuments(Documents):
    """Makes a row of the text of each document, or of each string in it. parts: by split."""

    def __init__(
        self, row_options: RowOptions, parts: Mapping[str, PartWriter], errors: BinaryIO
    ) -> None:
        super().__init__(row_options, errors)
        self._parts = parts
        self._train = parts[TRAIN]
        self._fields = Fields(row_options.fields) if row_options.fields else None
        self._joins = row_options.strings == "joined"
        self._fields_counted = 0  # documents whose other keys were looked at
        self._looked_at = 0  # documents of the file at hand

    def begin(self, path: str, source: str) -> None:
        """Start a file."""
        super().begin(path, source)
        self._looked_at = 0

    def end(self, whole: bool) -> None:
        """Finish a file."""
        super().end(whole)
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
        if characters < self._row_options.min_chars:
            self.tally.short += 1
            return
        self._parts[self._split_of(sha256)].add_file(
            text, size, self._source, sha256[-DIGEST_BYTES:]
        )

    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Take a structured document.

        offset (bytes), line (from 1): where it starts. number: its place in the file, from 1,
        where neither is known.
        """
        self._look_at([value])
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
            self.note(
                "no string", f"{where}no string with text in it{wanted}", SKIPPED, offset, line
            )
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
        self._look_at(values)
        self.tally.documents += len(values)
        if self._hashes or self._row_options.min_chars:
            for text in texts:
                self._row(text)
        else:
            self._train.extend(rows, self._source)
        return True

    def finish(self) -> None:
        """Finish the parts."""
        for part in self._parts.values():
            part.finish()

    def _extract(self, value: Any) -> list[str]:
        return extract_strings(self._fields.select(value) if self._fields else value)

    def _look_at(self, values: Sequence[Any]) -> None:
        """Count which documents are conversations, or what keys beside --fields hold text.

        Of some of them alone.
        """
        if not self._fields:
            for value in values[: _LOOKED_AT - self._looked_at]:
                self._looked_at += 1
                if name := conversations.detect_format(value):
                    self.tally.as_text[name] += conversations.is_conversation(value, name)
        else:
            for value in values[: _FIELDS_COUNTED - self._fields_counted]:
                self._fields_counted += 1
                self.tally.other_fields.update(self._fields.find_others(value))

    def _row(self, text: str) -> None:
        if len(text) < self._row_options.min_chars:
            self.tally.short += 1
            return
        data, replaced = encoding.encode_text(text)
        self.tally.replaced += replaced
        if not self._hashes:
            self._train.add(data, self._source)
            return
        digest = hashlib.sha256(data).digest()
        self._parts[self._split_of(digest)].add(data, self._source, digest[-DIGEST_BYTES:])


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
                stack.extend(
                    (f"{prefix}{key}", element, depth + 1) for key, element in item.items()
                )
            elif isinstance(item, list):
                stack.extend((path, element, depth) for element in item)
            elif isinstance(item, str) and path and not item.isspace() and item:
                found.add(path)
        return {
            key
            for key in found
            if not any(key == name or key.startswith(f"{name}.") for name in self._names)
        }


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
