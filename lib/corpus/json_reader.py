"""Read JSON and JSON Lines: quickly if the input is clean, otherwise value by value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from lib.corpus import json_data
from lib.corpus.documents import DROPPED, DROPPED_REST, TOO_LARGE, Documents
from lib.corpus.encoding import Locator
from lib.corpus.kinds import UTF8_BOM
from lib.corpus.raw_file import LARGE_BYTES, RawFile

_ELEMENTS = 64  # elements of a list that are added at once
_PARSED_AT_ONCE = 1 << 17  # characters of a large list
_LONGEST_KEY = 200  # characters of an object's first key
_LONGEST_CUT = 16  # characters before the end of a text in which its cut may cause an error
_NO_SPACE = re.compile(r"[^ \t\r\n]")
# Text datasets need no numbers, and int() refuses more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=float, parse_float=float)

try:
    import orjson

    _parse_fast: Callable[[bytes], Any] = orjson.loads
except ImportError:

    def _parse_fast(data: bytes) -> Any:
        return _DECODER.decode(data.decode())


def read_json_lines(raw: RawFile, documents: Documents) -> None:
    """Add one document per line; a line that is not JSON is dropped."""
    documents.lines = 0
    for offset, lines in raw.read_blocks():
        if lines is None:
            documents.lines += 1
            documents.note(*TOO_LARGE, DROPPED, offset, documents.lines)
        elif not documents.as_data and _add_lines(lines, documents):
            documents.lines += len(lines)
        else:
            for line in lines:
                documents.lines += 1
                _add_line(line, offset, raw, documents)
                offset = None if offset is None else offset + len(line)
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST)


def _add_lines(lines: list[bytes], documents: Documents) -> bool:
    """Add lines if each of them yields a row; otherwise return False and add nothing."""
    try:
        values = list(map(_parse_fast, lines))
    except (ValueError, RecursionError):
        return False
    return documents.add_values(values)


def _add_line(line: bytes, offset: int | None, raw: RawFile, documents: Documents) -> None:
    try:
        value = json_data.load_json_line(line) if documents.as_data else _parse_fast(line)
    except (ValueError, RecursionError):
        if not line.strip() or (raw.damage and not line.endswith(b"\n")):
            return  # a blank line, or one that is cut by damage
        try:
            decoder = json_data.DECODER if documents.as_data else _DECODER
            value = decoder.decode(documents.decode(line))
        except (ValueError, RecursionError) as error:
            documents.note(*_describe_error(error), DROPPED, offset, documents.lines)
            return
    documents.add_value(value, offset, documents.lines)


def read_json(raw: RawFile, documents: Documents) -> None:
    """Add one document per element of a top-level list, or one per value in the file."""
    data = raw.read()
    if data is not None and not raw.damage and not documents.as_data:
        try:
            value = _parse_fast(data.removeprefix(UTF8_BOM))
        except (ValueError, RecursionError):
            pass
        else:
            _add_elements(value, documents)
            return
    if data is None:
        decoded = raw.decode(documents.fallback)
        _Values(iter(decoded), raw, documents).read()
        documents.tally.replaced += decoded.replaced
    else:
        _Values(iter([documents.decode(data)]), raw, documents).read()
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST)


def _add_elements(value: Any, documents: Documents) -> None:
    elements = value if isinstance(value, list) else [value]
    for start in range(0, len(elements), _ELEMENTS):
        group = elements[start : start + _ELEMENTS]
        if not documents.add_values(group):
            for number, element in enumerate(group, start + 1):
                documents.add_value(element, number=number)


def _describe_error(error: Exception) -> tuple[str, str]:
    """Return the kind of problem and the message for an error of a JSON decoder."""
    if isinstance(error, RecursionError):
        return "nesting", "nested too deeply"
    text = (
        f"{error.msg} (column {error.colno})"
        if isinstance(error, json.JSONDecodeError)
        else str(error)
    )
    return "syntax", f"not valid JSON: {text}"


class _Values:
    """Reads the values of a text one by one, and reports the values that are not valid.

    texts: chunks of the text. Only the chunks of the current value are in memory.
    """

    def __init__(self, texts: Iterator[str], raw: RawFile, documents: Documents) -> None:
        self._texts = texts
        self._documents = documents
        self._decoder = json_data.DECODER if documents.as_data else _DECODER
        self._text = next(texts, "")
        self._ahead = ""
        self._ended = False
        self._slow_before = 0  # elements before this position are added one by one
        self._locator = Locator(self._text, raw.head)

    def read(self) -> None:
        """Read every complete JSON value, and add its documents."""
        position = self._skip(0)
        if self._text[position : position + 1] == "[":
            if self._is_first_of_many(position):
                self._read_values(position)
            else:
                self._read_list(position)
        else:
            self._read_values(position)

    def _is_first_of_many(self, position: int) -> bool:
        """Return whether more values follow the list at the start of the text.

        If so, the list is one document; otherwise each of its elements is. A list too large for
        memory is assumed to be the only value.
        """
        if not self._is_at_end():
            return False
        try:
            _, end = self._decoder.raw_decode(self._text, position)
        except (ValueError, RecursionError):
            return False
        return self._skip(end) < len(self._text)

    def _read_list(self, position: int) -> None:
        position = self._skip(position + 1)
        while self._text[position : position + 1] != "]":
            end = self._read_objects(position) or self._read_value(position, DROPPED_REST)
            if end < 0:
                return
            position = self._skip(end)
            if self._text[position : position + 1] == ",":
                position = self._skip(position + 1)
            elif self._text[position : position + 1] != "]":
                self._documents.note(
                    "syntax",
                    "not valid JSON: expected a comma or ]",
                    DROPPED_REST,
                    *self._locator.at(position),
                )
                return
        self._read_values(self._skip(position + 1))

    def _read_objects(self, position: int) -> int:
        """Add several elements of a list at once, if they are objects with the same first key.

        Returns the position after the last one. Returns 0 and adds nothing if the elements must be
        read one by one. The text that is parsed at once ends before a comma. If it is valid JSON
        between brackets, its last element is therefore complete, even if it is a number.
        """
        if (
            self._documents.as_data
            or position < self._slow_before
            or self._text[position : position + 1] != "{"
        ):
            return 0
        text = self._text
        limit = position + _PARSED_AT_ONCE
        first_key = text[position : text.find(":", position, position + _LONGEST_KEY) + 1]
        following = text.rfind(first_key, position + 1, limit) if first_key else -1
        end = len(text[position:following].rstrip(" \t\r\n")) + position - 1
        if following > 0 and text[end] == ",":
            with suppress(ValueError, RecursionError):
                if self._documents.add_values(_parse_fast(f"[{text[position:end]}]".encode())):
                    return end
        self._slow_before = limit
        return 0

    def _read_values(self, position: int) -> None:
        while position < len(self._text):
            end = self._read_value(position, DROPPED)
            # After a bad value, continue at the next line with the same first character: the next
            # line of JSON Lines, or the next value of indented JSON.
            position = self._skip(end) if end >= 0 else self._find_next_start()

    def _find_next_start(self) -> int:
        sign = self._text[self._bad]
        if sign not in "{[":  # the rest of a value whose beginning was cut off
            sign = "{"
        position = self._bad
        while (line_end := self._text.find("\n" + sign, position)) < 0:
            if not self._grow(max(position, len(self._text) - 1)):
                return len(self._text)
            position = 0
        return line_end + 1

    def _read_value(self, position: int, action: str) -> int:
        """Add the value at a position and return the position after it, -1 if it is not valid."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, position)
                # Only a number may continue beyond the text in memory, such as "1e+" of 1e+5.
                if end + 2 < len(self._text) or self._is_at_end():
                    break
            except (ValueError, RecursionError) as error:
                is_final = isinstance(error, RecursionError) or self._is_invalid(error)
                is_large = not is_final and len(self._text) - position > LARGE_BYTES
                if is_final or is_large or self._is_at_end():
                    problem = TOO_LARGE if is_large else _describe_error(error)
                    self._documents.note(*problem, action, *self._locator.at(position))
                    self._bad = position
                    return -1
            self._grow(position)
            position = 0
        self._documents.add_value(value, *self._locator.at(position))
        return end

    def _is_invalid(self, error: ValueError) -> bool:
        """Return whether a decoder fails at text that stays invalid if the value continues.

        The end of the text in memory may cut a string, whose start the error names, or a number, a
        literal or an escape, which are short.
        """
        return (
            isinstance(error, json.JSONDecodeError)
            and not error.msg.startswith("Unterminated string")
            and error.pos + _LONGEST_CUT < len(self._text)
        )

    def _skip(self, position: int) -> int:
        """Return the position of the next character that is not white space.

        The text before the position may be dropped from memory.
        """
        while (match := _NO_SPACE.search(self._text, position)) is None:
            if not self._grow(len(self._text)):
                return len(self._text)
            position = 0
        return match.start()

    def _grow(self, position: int) -> bool:
        """Drop the text before a position, and double the rest by reading on.

        The position becomes 0. At the end of the file, returns False and drops nothing.
        """
        chunks = []
        size = 0
        needed = len(self._text) - position
        while size <= needed and not self._is_at_end():
            chunk = self._ahead
            self._ahead = ""
            chunks.append(chunk)
            size += len(chunk)
        if not size:
            return False
        self._text = self._text[position:] + "".join(chunks)
        self._slow_before -= position
        self._locator.move(position, self._text)
        return True

    def _is_at_end(self) -> bool:
        """Return whether the text in memory reaches the end of the file."""
        if not self._ended and not self._ahead:
            self._ahead = next(self._texts, "")
            self._ended = not self._ahead
        return self._ended
