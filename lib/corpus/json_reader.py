"""JSON and JSON Lines, fast where the input is clean and value by value where it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from lib.corpus.documents import DROPPED, DROPPED_REST, TOO_LARGE, Documents
from lib.corpus.encoding import UTF8_BOM, Locator
from lib.corpus.source import LARGE_BYTES, Source

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
        if line is None:
            documents.problem(*TOO_LARGE, DROPPED, offset, number)
            continue
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
    data = source.read()
    if data is not None and not source.damage:
        try:
            value = _fast(data.removeprefix(UTF8_BOM))
        except (ValueError, RecursionError):
            pass
        else:
            _elements(value, documents)
            return
    if data is None:
        pieces = source.pieces(documents.fallback)
        _Values(iter(pieces), source, documents).read()
        documents.tally.replaced += pieces.replaced
    else:
        _Values(iter([documents.decode(data)]), source, documents).read()
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
    """Reads the values of a text one after the other, up to the first damage.

    texts: pieces of the text. Only those are in memory that hold the value at hand.
    """

    def __init__(self, texts: Iterator[str], source: Source, documents: Documents) -> None:
        self._texts, self._documents = texts, documents
        self._text, self._ended = next(texts, ""), False
        self._locator = Locator(self._text, source.head)

    def read(self) -> None:
        """Hand on every value that is whole."""
        position = self._skip(0)
        if self._text[position:position + 1] == "[":
            if self._is_first_of_many(position):
                self._values(position)
            else:
                self._list(position)
        else:
            self._values(position)

    def _is_first_of_many(self, position: int) -> bool:
        """Tell whether other values follow the list at the start: then each is a document.

        A list too large for memory is taken to be the only one.
        """
        if not self._is_at_end():
            return False
        try:
            _, end = _DECODER.raw_decode(self._text, position)
        except (ValueError, RecursionError):
            return False
        return self._skip(end) < len(self._text)

    def _list(self, position: int) -> None:
        position = self._skip(position + 1)
        while self._text[position:position + 1] != "]":
            position = self._value(position, DROPPED_REST)
            if position < 0:
                return
            position = self._skip(position)
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
            position = self._skip(end) if end >= 0 else self._next_alike()

    def _next_alike(self) -> int:
        sign, position = self._text[self._bad], self._bad
        while (found := self._text.find("\n" + sign, position)) < 0:
            if not self._grow(max(position, len(self._text) - 1)):
                return len(self._text)
            position = 0
        return found + 1

    def _value(self, position: int, action: str) -> int:
        """Hand on the value at a position and return where it ends, -1 when it is not whole."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, position)
                # A number may go on beyond what is in memory ("1e+" of 1e+5); nothing else can.
                if end + 2 < len(self._text) or self._is_at_end():
                    break
            except (ValueError, RecursionError) as error:
                is_large = len(self._text) - position > LARGE_BYTES
                if is_large or isinstance(error, RecursionError) or self._is_at_end():
                    problem = TOO_LARGE if is_large else _described(error)
                    self._documents.problem(*problem, action, *self._locator.at(position))
                    self._bad = position
                    return -1
            self._grow(position)
            position = 0
        self._documents.value(value, *self._locator.at(position))
        return end

    def _skip(self, position: int) -> int:
        """Return where the next value or mark starts; what comes before may be forgotten."""
        while (position := _SPACE.match(self._text, position).end()) == len(self._text):
            if not self._grow(position):
                break
            position = 0
        return position

    def _grow(self, position: int) -> bool:
        """Forget what comes before a position, which becomes 0, and double what comes after it.

        Returns False, and forgets nothing, when there is no more.
        """
        more, wanted = [], len(self._text) - position
        size = 0
        while not self._ended and size <= wanted:
            piece = next(self._texts, "")
            self._ended = not piece
            more.append(piece)
            size += len(piece)
        if not size:
            return False
        self._text = self._text[position:] + "".join(more)
        self._locator.move(position, self._text)
        return True

    def _is_at_end(self) -> bool:
        """Tell whether all that is left is in memory."""
        if not self._ended:
            piece = next(self._texts, "")
            self._ended = not piece
            self._texts = chain([piece], self._texts)
        return self._ended
