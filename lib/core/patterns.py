"""Regular expressions that somebody else may have written: those that could run on are refused.

Python's `re` tries all ways to divide a text between repetitions. If one repeats another, the
number of ways doubles with each character, so a short name takes years; several repetitions in a
row cost the length of the text to that power.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser
else:
    import sre_parse as _parser

_MOST_REPETITIONS, _MOST_CHARACTERS = 3, 20_000
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def find_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used, "" if it can."""
    if len(pattern) > _MOST_CHARACTERS:
        return f"it has more than {_MOST_CHARACTERS:,} characters"
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        inner = [list(_repetitions(body)) for body in _repetitions(parsed)]
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    if any(inner) or any(_has_alternatives(body) for body in _repetitions(parsed)):
        return "it repeats a part that contains a repetition or alternatives, and may never end"
    if len(inner) > _MOST_REPETITIONS:
        return f"it has more than {_MOST_REPETITIONS} repetitions, and may take very long"
    return ""


def _repetitions(parsed: Any) -> Iterator[Any]:
    """Yield what each repetition in a parsed pattern repeats, but for those inside of others."""
    for name, argument in parsed:
        if str(name) in _REPEATS and argument[1] > 1:
            yield argument[2]
        else:
            for part in _parts(argument):
                yield from _repetitions(part)


def _has_alternatives(parsed: Any) -> bool:
    """Return whether a parsed pattern can match the same text in several ways by alternatives."""
    return any(str(name) in ("BRANCH", "GROUPREF_EXISTS") or any(
        map(_has_alternatives, _parts(argument))) for name, argument in parsed)


def _parts(argument: Any) -> Iterator[Any]:
    """Yield the parsed patterns inside the argument of a node."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for part in argument:
            yield from _parts(part)
