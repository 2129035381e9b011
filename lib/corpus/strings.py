"""The text of a structured document: every string value in it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Fields:
    """The dotted keys that `--fields` keeps; lists on the way are passed through.

    seen: those that some document had.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._ways = frozenset(name[:i] for name in names for i, c in enumerate(name) if c == ".")
        self.seen: set[str] = set()

    def select(self, value: Any) -> list[Any]:
        """Return the values under the kept keys, in the order of the document."""
        found: list[Any] = []
        stack = [("", value)]
        while stack:
            path, item = stack.pop()
            if path in self._names:
                self.seen.add(path)
                found.append(item)
            elif isinstance(item, list):
                stack.extend((path, element) for element in reversed(item))
            elif isinstance(item, dict) and (not path or path in self._ways):
                prefix = f"{path}." if path else ""
                stack.extend((f"{prefix}{key}", item[key]) for key in reversed(item))
        return found


def strings_of(value: Any) -> list[str]:
    """Return every string value in nested dicts and lists, in order; keys are no values."""
    found: list[str] = []
    stack = [iter((value,))]  # no recursion: documents nest thousands of levels deep
    while stack:
        for item in stack[-1]:
            kind = type(item)  # parsers make no subclasses, and this is all that text is made of
            if kind is str:
                found.append(item)
            elif kind is dict:
                stack.append(iter(item.values()))
                break
            elif kind is list:
                stack.append(iter(item))
                break
        else:
            stack.pop()
    return found
