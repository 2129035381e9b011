"""Read and write JSON without loss: integers of any size stay exact.

NaN and infinity become null, because pandas writes missing values as NaN.
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

_MOST_DIGITS = 4000  # int() and str() accept slightly more
# orjson converts an integer of more than 64 bits to a float. To find long numbers, all digits are
# mapped to 0 and _LONG is searched, which takes less than half the time of a regular expression.
_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19


class UnwritableValue(ValueError):
    """Raised if a value cannot be stored as JSON; the message says why."""


def _parse_int(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MOST_DIGITS else None


def _parse_float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


DECODER = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=lambda name: None
)


def load_json(text: str) -> Any:
    """Return the value of a JSON text; raises ValueError or RecursionError if it is not valid."""
    if orjson is not None and _LONG not in text.encode(errors="replace").translate(_ALIKE):
        try:
            return orjson.loads(text)
        except ValueError:
            pass  # the json module accepts more, such as NaN
    return DECODER.decode(text)


def load_json_line(line: bytes) -> Any:
    """Return the value of a line of JSON in UTF-8.

    Raises ValueError or RecursionError if the line is not valid; the caller then tries a more
    tolerant decoder. A dataset stores numbers only in tools and their arguments, so other lines
    are not searched for long integers.
    """
    has_tools = b'"tool' in line or b'"function' in line
    if orjson is None or (has_tools and _LONG in line.translate(_ALIKE)):
        return DECODER.decode(line.decode())
    return orjson.loads(line)


def dump_json(value: Any, is_sorted: bool = False) -> bytes:
    """Return a value as JSON.

    Raises UnwritableValue if JSON cannot hold it, and UnicodeEncodeError if it contains lone
    surrogates, which `repair_strings` replaces.
    """
    if orjson is not None:
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if is_sorted else 0)
        except TypeError:
            pass  # such as integers of more than 64 bits, or keys that are not strings
    return json.dumps(
        _to_json_types(value), ensure_ascii=False, separators=(",", ":"), sort_keys=is_sorted
    ).encode()


def repair_strings(value: Any) -> tuple[Any, int]:
    """Return a value without lone surrogates in its strings, and the number of replacements."""
    count = 0

    def repair(item: Any) -> Any:
        nonlocal count
        if isinstance(item, str):
            data, replaced = encoding.encode_text(item)
            count += replaced
            return data.decode()
        if isinstance(item, list):
            return list(map(repair, item))
        if isinstance(item, dict):
            return {repair(key): repair(child) for key, child in item.items()}
        return item

    return repair(value), count


def _to_json_types(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON types; dates, decimals and the like become strings."""
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
        raise UnwritableValue("it contains binary data")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
