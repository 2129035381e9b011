"""Refuse regular expressions that backtrack for years; a stranger may have written them.

Python's `re` tries all ways to divide a text between repetitions. If one repetition contains
another, the number of ways doubles with each character. Several repetitions in a row cost the
length of the text to the power of their number. Alternatives in a row multiply the ways too, but
only if they match the same text. So an expression of usual form is tried on some names, and
matching has a time limit.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lib.core.errors import UsageError

if sys.version_info >= (3, 11):
    from re import _parser
else:
    import sre_parse as _parser

_MOST_REPETITIONS = 3
_MOST_CHARACTERS = 20_000
_MOST_OPTIONAL = 4  # each one doubles the time at most
_LIMIT_S = 2.0  # of processor time; usual patterns match all names of a model in milliseconds
_NAMES = (
    "model.layers.10.self_attn.q_proj",
    "model.language_model.layers.31.block_sparse_moe.experts.127.gate_up_proj",
)
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
    try:
        with limit_time("it"):
            for name in _NAMES:
                re.fullmatch(pattern, name)
    except UsageError as error:
        return error.problem
    return ""


@contextmanager
def limit_time(subject: str) -> Iterator[None]:
    """Raise UsageError if a block that matches a regular expression takes too long.

    subject: the option in the message. `re` looks for signals while it matches. Threads other than
    the main thread get no signals, and no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise UsageError(
            f"{subject} takes more than {_LIMIT_S:.0f} s to match the name of a layer",
            expected="alternatives that differ, such as 'q_proj|v_proj'",
        )

    earlier = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier or signal.SIG_DFL)


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
