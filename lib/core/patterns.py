"""Refuse regular expressions that backtrack for years; a stranger may have written them.

Python's `re` tries all ways to divide a text between repetitions. If one repetition contains
another, the number of ways doubles with each character. Several repetitions in a row cost the
length of the text to the power of their number.
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

_MOST_REPETITIONS = 3
_MOST_CHARACTERS = 20_000
_MOST_OPTIONAL = 4  # each one doubles the time at most
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def find_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used, "" if it can."""
    if len(pattern) > _MOST_CHARACTERS:
        return f"it has more than {_MOST_CHARACTERS:,} characters"
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        repetitions = [*_list_repetitions(parsed)]
        bodies = [body for body, most in repetitions if most > 1]
        inner = [[*_list_repetitions(body)] for body in bodies]
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    if any(inner) or any(map(_has_alternatives, bodies)):
        return "it repeats a part that contains a repetition or alternatives, and may never end"
    if len(inner) > _MOST_REPETITIONS:
        return f"it has more than {_MOST_REPETITIONS} repetitions, and may take very long"
    if len(repetitions) - len(bodies) > _MOST_OPTIONAL:
        return f"it has more than {_MOST_OPTIONAL} optional parts, and may take very long"
    return ""


def _list_repetitions(parsed: Any) -> Iterator[Any]:
    """Yield the body of each repetition in a parsed pattern, and its largest count.

    Repetitions inside optional parts (`?`) are yielded too, but not inside other repetitions.
    """
    for name, argument in parsed:
        least, most = argument[:2] if str(name) in _REPEATS else (1, 1)
        if most > 1 or least < most:
            yield argument[2], most
        if most <= 1:
            for part in _list_parts(argument):
                yield from _list_repetitions(part)


def _has_alternatives(parsed: Any) -> bool:
    """Return whether a parsed pattern has alternatives, which may match the same text."""
    return any(
        str(name) in ("BRANCH", "GROUPREF_EXISTS")
        or any(map(_has_alternatives, _list_parts(argument)))
        for name, argument in parsed
    )


def _list_parts(argument: Any) -> Iterator[Any]:
    """Yield the parsed patterns inside the argument of a node."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for part in argument:
            yield from _list_parts(part)
