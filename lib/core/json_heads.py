"""Decide by the first bytes of a file whether it contains JSON Lines, other JSON, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from lib.core.placeholders import HEAD_BYTES, decode_head

JSON = "json"
JSON_LINES = "jsonl"
_LONGEST_CUT = 16  # characters before the end of a text in which its cut may cause an error
_STARTS = '{["-0123456789tfnNI'
_SPACE = " \t\r\n"
_FENCES = ("```", "~~~")  # Markdown shows the lines between them as an example
_TURN_KEYS = {"role", "from"}  # of a turn; a line may be a list of turns
_DECODER = json.JSONDecoder()


class _Value(NamedTuple):
    """Describes the value at the start of a text.

    value: None if it is cut. end: the position after it, or the length of the text.
    """

    value: Any
    end: int
    is_cut: bool


def find_json(head: bytes) -> str:
    """Return JSON_LINES for a text most of whose lines are JSON objects, JSON for objects in a row.

    Returns "" for other texts. head: the first HEAD_BYTES bytes of a file of any name.
    """
    if b"{" not in head:
        return ""
    lines = list(_list_lines(head))
    if any(line.startswith(_FENCES) for line, _ in lines):
        return ""
    if 2 * sum(_is_object(line, is_cut) for line, is_cut in lines) > len(lines):
        return JSON_LINES
    return JSON if len(lines) == 1 and _has_objects_in_a_row(*lines[0]) else ""


def choose_json_kind(kind: str, head: bytes) -> str:
    """Return JSON or JSON_LINES for a file whose suffix names one of them, "" if it is neither.

    kind: the format that the suffix names. head: the first HEAD_BYTES bytes. Lines before the
    first value may be damaged, since large files are cut anywhere.
    """
    text = _clean(head)
    if not text.strip(_SPACE):
        return kind
    start = text.lstrip(_SPACE)
    is_cut = len(head) >= HEAD_BYTES
    first = _read_value(start, is_cut) if start[0] in _STARTS else None
    if first and (chosen := _choose_by_first(kind, start, first)):
        return chosen
    lines = list(_list_lines(head))
    valid = sum(_is_value(line, cut) for line, cut in lines)
    if valid and (kind == JSON_LINES or 2 * valid >= len(lines)):
        return JSON_LINES
    if _starts_value_later(start):
        return JSON
    if start[0] in "{[" or (is_cut and len(lines) == 1):
        return kind  # all of it may be damaged
    return ""


def _choose_by_first(kind: str, text: str, first: _Value) -> str:
    """Return the kind of a text that begins with a complete or cut value, "" if that is open."""
    if "\n" in text[: first.end]:
        return JSON
    if first.is_cut or not text[first.end :].strip(_SPACE):
        # A single line. It may be a list of records, or one record that is a list of turns.
        return JSON if _is_list_of_records(text) else kind
    rest = text[first.end :].lstrip(" \t")
    if rest[0] in "{[" or (rest[0] == "\r" and "\n" not in text):
        return JSON  # several values on one line, or lines that end with CR
    return ""


def _is_list_of_records(text: str) -> bool:
    if text[0] != "[":
        return False
    start = text[1:].lstrip(_SPACE)
    if not start.startswith("{"):
        return False
    first = _read_value(start, True)
    return first is not None and not (first.value and _TURN_KEYS & first.value.keys())


def _starts_value_later(text: str) -> bool:
    """Return whether a later line is the first line of an indented value."""
    return any(line.rstrip() in ("{", "[", "[{") for line in text.split("\n")[1:])


def _read_value(text: str, may_be_cut: bool) -> _Value | None:
    """Return the value at the start of a text, None if it is not valid."""
    try:
        value, end = _DECODER.raw_decode(text)
    except RecursionError:
        return _Value(None, len(text), True)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated") or error.pos + _LONGEST_CUT >= len(text)
        return _Value(None, len(text), True) if may_be_cut and is_cut else None
    except ValueError:  # an integer of thousands of digits
        return _Value(None, len(text), True)
    return _Value(value, end, False)


def _list_lines(head: bytes) -> Iterator[tuple[str, bool]]:
    """Yield the lines that are not blank, and whether the end of the head may cut them."""
    lines = _clean(head).split("\n")
    is_cut = len(head) >= HEAD_BYTES
    for number, line in enumerate(lines, 1):
        if stripped := line.strip():
            yield stripped, is_cut and number == len(lines)


def _is_object(line: str, is_cut: bool) -> bool:
    if line[:1] != "{":
        return False
    value = _read_value(line, is_cut)
    if value is None or (value.is_cut and not line.startswith('{"')):
        return False
    return value.is_cut or (bool(value.value) and value.end == len(line))


def _has_objects_in_a_row(text: str, is_cut: bool) -> bool:
    """Return whether a line consists of several objects without line ends between them."""
    first = _read_value(text, is_cut)
    if first is None or first.is_cut or not isinstance(first.value, dict):
        return False
    return _is_object(text[first.end :].lstrip(), is_cut) or _has_objects_in_a_row(
        text[first.end :].lstrip(), is_cut
    )


def _is_value(line: str, is_cut: bool) -> bool:
    """Return whether a line is a JSON object, list or string."""
    value = _read_value(line, is_cut) if line[0] in '{["' else None
    return value is not None and (value.is_cut or value.end == len(line))


def _clean(head: bytes) -> str:
    """Return the text of a head without the NUL bytes with which a crash may pad a file."""
    return decode_head(head).strip("\0")
