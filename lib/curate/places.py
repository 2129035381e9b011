"""Name the place of a row: its split and its number there, and its dataset if that is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lib.core.data_names import TRAIN, VALIDATION


def locate_row(number: int, validation_rows: int) -> dict[str, Any]:
    """Return the split of a row and its number there. number: in the curation."""
    if number < validation_rows:
        return {"split": VALIDATION, "row": number}
    return {"split": TRAIN, "row": number - validation_rows}


def describe_place(place: Mapping[str, Any] | None) -> str:
    """Return the place of a row as text, "" for None."""
    if not place:
        return ""
    text = f"{place['split']} row {place['row']:,}"
    return f"{text} of {place['dataset']}" if "dataset" in place else text
