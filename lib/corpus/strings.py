"""The text of a structured document: every string value in it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_MOST_KEYS, _DEEPEST_KEY = 500, 8


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

    def others(self, value: Any) -> set[str]:
        """Return the dotted keys of a document that hold text and are not kept."""
        return {key for key in keys_of(value)
                if not any(key == name or key.startswith(f"{name}.") for name in self._names)}


def keys_of(value: Any) -> set[str]:
    """Return the dotted keys of a document under which text lies, as `--fields` takes them.

    Not more than a few hundred, and none of those that lie deep: nobody would read or type them.
    """
    found: set[str] = set()
    stack = [("", value, 0)]
    while stack and len(found) < _MOST_KEYS:
        path, item, depth = stack.pop()
        if isinstance(item, dict) and depth < _DEEPEST_KEY:
            prefix = f"{path}." if path else ""
            stack.extend((f"{prefix}{key}", element, depth + 1) for key, element in item.items())
        elif isinstance(item, list):
            stack.extend((path, element, depth) for element in item)
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
