"""What to say of an option that there is not: what its name means elsewhere, or the nearest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence

from lib.core import elsewhere
from lib.core.errors import UsageError

SIMILAR = 0.75  # below it, difflib names options that only share some letters


def nearest(flag: str, ours: Collection[str]) -> tuple[str, str]:
    """Return what follows `unknown option`, and the hint: both empty when nothing is close.

    ours: the options of the parser.
    """
    if advice := elsewhere.advice(flag, ours):
        return "", advice
    options = {option.lstrip("-"): option for option in ours if option.startswith("--")}
    words = set(flag.lstrip("-").split("-"))
    near = [name for name in options if words <= set(name.split("-"))]  # --epochs
    if len(near) != 1:
        near = difflib.get_close_matches(flag.lstrip("-"), options, n=1, cutoff=SIMILAR)
    if not near:  # perhaps a name that is taken for one
        options = {name.lstrip("-"): name for name in elsewhere.spellings(ours)}
        near = difflib.get_close_matches(flag.lstrip("-"), options, n=1, cutoff=SIMILAR)
    return f"; the nearest is {options[near[0]]}" if near else "", ""


def errors(words: Sequence[str], ours: Collection[str]) -> Iterator[UsageError]:
    """Yield an error for each option among the words that a parser did not know.

    Where a word stands before the first of them, it alone is told.
    """
    if not words[0].startswith("-"):
        yield UsageError(f"unexpected argument {words[0]!r}")
        return
    for flag in dict.fromkeys(
        word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)
    ):
        near, hint = nearest(flag, ours)
        yield UsageError(f"unknown option {flag}{near}", hint=hint)
