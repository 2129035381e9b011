"""Compare the identities of artifacts or runs: the options and inputs they are made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lib.core.unknown_options import update_values

_LONGEST_FLOAT = 10  # characters of a float that is printed with all its digits


class Difference(NamedTuple):
    """A value that differs between two identities.

    kind: option, input or format. name: the field of an option, or the path of an input with dots
    between levels. there, now: the values in the artifact and in this launch.
    """

    kind: str
    name: str
    there: Any
    now: Any

    def describe(self, earlier_word: str = "there", later_word: str = "now") -> str:
        """Return a phrase with both values. earlier_word, later_word: what follows each value."""
        label = "--" + self.name.replace("_", "-") if self.kind == "option" else self.name
        earlier = _format_value(self.there, self.now)
        return (
            f"{label}: {earlier} {earlier_word}, {_format_value(self.now, self.there)} {later_word}"
        )

    def __str__(self) -> str:
        return self.describe()


def find_differences(old: Any, new: Any) -> list[Difference]:
    """Return the differences of two identities, `{"options": …, "inputs": …}`, sorted by name.

    Options of earlier versions in `old` are compared as this version would write them.
    """
    if isinstance(old, dict) and isinstance(old.get("options"), dict):
        old = old | {"options": update_values(old["options"], new.get("options", ()))}
    return _compare(old, new, "")


def _compare(old: Any, new: Any, path: str) -> list[Difference]:
    """Return the differences of two values. path: their place, with dots between levels."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            difference
            for key in sorted(old.keys() | new.keys())
            for difference in _compare(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    kind, name = (
        ("option", path.removeprefix("options."))
        if path.startswith("options.")
        else ("input", path.removeprefix("inputs."))
    )
    return [] if old == new else [Difference(kind, name, old, new)]


def list_differences(differences: Iterable[Difference]) -> str:
    """Return one line of text per difference."""
    return "\n".join(map(str, differences))


def _format_value(value: Any, other: Any) -> str:
    """Return a value as text; show all digits of a float only if it looks like `other`."""
    if value is None:
        return "not given"
    if not isinstance(value, float) or len(repr(value)) <= _LONGEST_FLOAT:
        return str(value)
    short = f"{value:g}"
    return repr(value) if isinstance(other, float) and short == f"{other:g}" else short
