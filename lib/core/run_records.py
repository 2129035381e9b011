"""Read the files of a run for people and launchers: check types, make text harmless.

A run may come from anywhere, and its files are shown in a terminal. A value of the wrong type is
ignored. Control characters are spelled out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lib.core import records
from lib.core.errors import visible

_TEXTS = {"status", "event", "time", "host", "machine", "born", "id"}
_WHOLE = {
    "step",
    "global_step",
    "total_steps",
    "tokens",
    "samples",
    "sample_cursor",
    "ranks",
    "pid",
}
_LARGEST = 1 << 62  # what is larger is no count of a run, and no number that formats take
# Characters that change the text direction or break a line.
_MORE_CONTROLS = {
    number: f"\\u{number:04x}"
    for number in (*range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def one_line(text: object) -> str:
    """Return a text as it can stand within a line of a terminal."""
    text = visible(str(text)).translate(_MORE_CONTROLS)
    return text.replace("\n", "\\n").replace("\t", "\\t")


def state(path: Path) -> dict[str, Any]:
    """Return what state.json, or a lock, says; empty where there is none that can be read."""
    return _checked(records.mapping(path))


def row(line: bytes) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl or events.jsonl; None for one that is torn or has no step."""
    found = records.logged_row(line)
    checked = _checked(found) if found else {}
    return checked if "step" in checked else None


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    return {
        one_line(name): _plain(value) for name, value in content.items() if _has_type(name, value)
    }


def _has_type(name: str, value: object) -> bool:
    """Return whether a value has the type that its name asks for; other names may have any."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _WHOLE:
        return type(value) is int and 0 <= value < _LARGEST
    if "/" in name or name == "epoch":  # a figure
        return type(value) is float or (type(value) is int and abs(value) < _LARGEST)
    return True


def _plain(value: Any) -> Any:
    """Return a value whose texts are harmless, and whose numbers can be formatted."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {one_line(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value) is int and abs(value) >= _LARGEST:
        return math.inf if value > 0 else -math.inf
    return value
