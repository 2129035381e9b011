"""JSON with all its numbers, in and out: whole numbers of any size stay whole and exact.

What is NaN or infinite becomes null: NaN is how pandas writes a value that is missing.
"""

from __future__ import annotations

import json
import math
from typing import Any

from lib.core.conversation import DEEPEST
from lib.corpus import encoding

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

_MOST_DIGITS = 4000  # that int() and str() take
# orjson makes a float of a whole number of more than 64 bits. Twice as fast as a regular
# expression and more is to make all digits alike.
_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19


class UnwritableValue(ValueError):
    """Says in words why a value cannot be kept as JSON."""


def _parse_int(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MOST_DIGITS else None


def _parse_float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


DECODER = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=lambda name: None
)


def load_json(text: str) -> Any:
    """Return the value of a text; ValueError or RecursionError where it is not JSON."""
    if orjson is not None and _LONG not in text.encode(errors="replace").translate(_ALIKE):
        try:
            return orjson.loads(text)
        except ValueError:
            pass  # what json takes all the same
    return DECODER.decode(text)


def load_json_line(line: bytes) -> Any:
    """Return the value of a line that is clean, UTF-8 and JSON; ValueError or RecursionError else.

    Only functions and their arguments may hold numbers that are kept.
    """
    may_count = b'"tool' in line or b'"function' in line
    if orjson is None or (may_count and _LONG in line.translate(_ALIKE)):
        return DECODER.decode(line.decode())
    return orjson.loads(line)


def dump_json(value: Any, is_sorted: bool = False) -> bytes:
    """Return a value as JSON; UnwritableValue, or UnicodeEncodeError where `repaired` is needed."""
    if orjson is not None:
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if is_sorted else 0)
        except TypeError:
            pass  # whole numbers of more than 64 bits, keys that are no text, …
    return json.dumps(
        _to_json_types(value), ensure_ascii=False, separators=(",", ":"), sort_keys=is_sorted
    ).encode()


def repair_strings(value: Any) -> tuple[Any, int]:
    """Return a value whose texts are Unicode, and how many lone surrogates were replaced in it."""
    count = 0

    def repair(item: Any) -> Any:
        nonlocal count
        if isinstance(item, str):
            data, more = encoding.encode_text(item)
            count += more
            return data.decode()
        if isinstance(item, list):
            return list(map(repair, item))
        if isinstance(item, dict):
            return {repair(key): repair(child) for key, child in item.items()}
        return item

    return repair(value), count


def _to_json_types(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON knows it: dates and decimal numbers become texts."""
    if depth > DEEPEST:
        raise UnwritableValue(f"it is nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        return {str(key): _to_json_types(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list):
        return [_to_json_types(child, depth + 1) for child in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, bytes):
        raise UnwritableValue("it holds bytes that are no text")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
