"""The text of a structured document: every string value in it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def keys_of(value: Any) -> set[str]:
    """Return the dotted keys of a document under which text lies, as `--fields` takes them."""
    found: set[str] = set()
    stack = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            prefix = f"{path}." if path else ""
            stack.extend((f"{prefix}{key}", element) for key, element in item.items())
        elif isinstance(item, list):
            stack.extend((path, element) for element in item)
        elif isinstance(item, str) and path and not item.isspace() and item:
            found.add(path)
    return found


def strings_of(value: Any) -> list[str]:
    """Return every string value in nested dicts and lists, in order; keys are not values."""
    found: list[str] = []
    items: Iterator[Any] = iter(value.values() if type(value) is dict else (value,))
    stack: list[Iterator[Any]] = []  # no recursion: documents nest thousands of levels deep
    while True:
        for item in items:
            kind = type(item)  # parsers make no subclasses, and this is all that text is made of
            if kind is str:
                found.append(item)
            elif kind is dict or kind is list:
                stack.append(items)
                items = iter(item.values() if kind is dict else item)
                break
        else:
            if not stack:
                return found
            items = stack.pop()
