"""What an artifact or a run is made of, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

_LONGEST_FLOAT = 10  # characters of a float that is told as it is


class Difference(NamedTuple):
    """Names something that two identities do not share.

    kind: option, input or format. name: of an option as a field, of an input with dots between the
    levels.
    """

    kind: str
    name: str
    there: Any
    now: Any

    def in_words(self, there: str = "there", now: str = "now") -> str:
        """Return it in words, an option as a person types it. there, now: where the two are."""
        label = "--" + self.name.replace("_", "-") if self.kind == "option" else self.name
        return (
            f"{label}: {_shown(self.there, self.now)} {there}, {_shown(self.now, self.there)} {now}"
        )

    def __str__(self) -> str:
        return self.in_words()


def differences(old: Any, new: Any, path: str = "") -> list[Difference]:
    """Return what differs between two identities, `{"options": …, "inputs": …}`, sorted by name.

    path: of the values in their identities, with dots between the levels.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in sorted(old.keys() | new.keys())
            for found in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    kind, name = (
        ("option", path.removeprefix("options."))
        if path.startswith("options.")
        else ("input", path.removeprefix("inputs."))
    )
    return [] if old == new else [Difference(kind, name, old, new)]


def in_lines(found: Iterable[Difference]) -> str:
    """Return differences in words, one a line."""
    return "\n".join(map(str, found))


def _shown(value: Any, other: Any) -> str:
    """Return a value as a person would type it, with all its digits only where they matter."""
    if value is None:
        return "not given"
    if not isinstance(value, float) or len(repr(value)) <= _LONGEST_FLOAT:
        return str(value)
    short = f"{value:g}"
    return repr(value) if isinstance(other, float) and short == f"{other:g}" else short
