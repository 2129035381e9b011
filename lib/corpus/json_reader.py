"""JSON and JSON Lines, fast where the input is clean and value by value where it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from lib.corpus.documents import DROPPED, DROPPED_REST, Documents
from lib.corpus.encoding import UTF8_BOM, Locator
from lib.corpus.source import Source

# A larger file is not turned into objects as a whole: they take several times its size.
_WHOLE_BYTES = 64_000_000
_SPACE = re.compile(r"[ \t\r\n]*")
# Numbers are never kept, and int() refuses more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float, parse_float=float)

try:
    import orjson
    _fast: Callable[[bytes], Any] = orjson.loads
except ImportError:
    def _fast(data: bytes) -> Any:
        return _DECODER.decode(data.decode())


def read_json_lines(source: Source, documents: Documents) -> None:
    """Hand on one document per line; a line that is no JSON is dropped and the next one read."""
    for number, (offset, line) in enumerate(source.lines(), 1):
        documents.lines = number
        try:
            value = _fast(line)
        except (ValueError, RecursionError):
            if not line.strip():
                continue
            if source.damage and not line.endswith(b"\n"):
                break  # the last line is cut
            try:
                value = _DECODER.decode(documents.decode(line))
            except (ValueError, RecursionError) as error:
                documents.problem(*_described(error), DROPPED, offset, number)
                continue
        documents.value(value, offset, number)
    if source.damage:
        documents.problem("cut", source.damage, DROPPED_REST)


def read_json(source: Source, documents: Documents) -> None:
    """Hand on one document per element of a top-level list, else one per value in the file."""
    data = source.read().removeprefix(UTF8_BOM)
    if len(data) <= _WHOLE_BYTES and not source.damage:
        try:
            value = _fast(data)
        except (ValueError, RecursionError):
            pass
        else:
            _elements(value, documents)
            return
    _Values(documents.decode(data), source, documents).read()
    if source.damage:
        documents.problem("cut", source.damage, DROPPED_REST)


def _elements(value: Any, documents: Documents) -> None:
    for number, element in enumerate(value if isinstance(value, list) else [value], 1):
        documents.value(element, number=number)


def _described(error: Exception) -> tuple[str, str]:
    """Return the kind of problem and a message for what a JSON decoder raised."""
    if isinstance(error, RecursionError):
        return "nesting", "nested too deeply"
    text = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) \
        else str(error)
    return "syntax", f"not valid JSON: {text}"


class _Values:
    """Reads the values of a text one after the other, up to the first damage."""

    def __init__(self, text: str, source: Source, documents: Documents) -> None:
        self._text, self._documents = text, documents
        self._locator = Locator(text, source.head)

    def read(self) -> None:
        """Hand on every value that is whole."""
        position = self._skip(0)
        if self._text[position:position + 1] == "[":
            if len(self._text) <= _WHOLE_BYTES and self._is_first_of_many(position):
                self._values(position)
            else:
                self._list(position)
        else:
            self._values(position)

    def _is_first_of_many(self, position: int) -> bool:
        """Tell whether other values follow the list at the start: then each is a document."""
        try:
            _, end = _DECODER.raw_decode(self._text, position)
        except (ValueError, RecursionError):
            return False
        return self._skip(end) < len(self._text)

    def _list(self, position: int) -> None:
        position = self._skip(position + 1)
        while self._text[position:position + 1] != "]":
            end = self._value(position, DROPPED_REST)
            if end < 0:
                return
            position = self._skip(end)
            if self._text[position:position + 1] == ",":
                position = self._skip(position + 1)
            elif self._text[position:position + 1] != "]":
                self._documents.problem("syntax", "not valid JSON: expected a comma or ]",
                                        DROPPED_REST, *self._locator.at(position))
                return
        self._values(self._skip(position + 1))

    def _values(self, position: int) -> None:
        while position < len(self._text):
            end = self._value(position, DROPPED)
            # After a bad value, go on at the next line that starts as it did: in JSON Lines that
            # is the next line, in indented JSON the next value.
            position = self._skip(end) if end >= 0 else self._next_alike(position)

    def _next_alike(self, position: int) -> int:
        found = self._text.find("\n" + self._text[position], position)
        return len(self._text) if found < 0 else found + 1

    def _value(self, position: int, action: str) -> int:
        """Hand on the value at a position and return where it ends, -1 when it is not whole."""
        try:
            value, end = _DECODER.raw_decode(self._text, position)
        except (ValueError, RecursionError) as error:
            self._documents.problem(*_described(error), action, *self._locator.at(position))
            return -1
        self._documents.value(value, *self._locator.at(position))
        return end

    def _skip(self, position: int) -> int:
        return _SPACE.match(self._text, position).end()
