"""Read the files of a run for people and launchers: check types, escape control characters.

A run may come from anywhere, and a terminal shows its files. Values of the wrong type are ignored.
"""

from __future__ import annotations

import calendar
import math
import re
import time
from pathlib import Path
from typing import Any

from lib.core import records
from lib.core.errors import one_line
from lib.core.paths import COMMIT, Experiment, step_of
from lib.runs import row_files

_TEXTS = {"status", "event", "time", "host", "machine", "born", "id", "copy_error"}
_COUNTS = {
    "step",
    "global_step",
    "total_steps",
    "tokens",
    "samples",
    "sample_cursor",
    "ranks",
    "pid",
    "copied",
}
_ID = re.compile(r"[0-9a-f]+")  # of a run or a launch
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LARGEST = 1 << 62  # a larger number is no count of a run, and cannot be formatted


def format_time(seconds: float | None = None) -> str:
    """Return a UTC time in the format of events.jsonl and metrics.jsonl.

    seconds: since the epoch (default: now).
    """
    return time.strftime(_TIME, time.gmtime(seconds))


def parse_time(text: object) -> float:
    """Return the seconds since the epoch of a time that `format_time` wrote, or 0."""
    try:
        return float(calendar.timegm(time.strptime(str(text), _TIME)))
    except ValueError:
        return 0.0


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of state.json or a lock; empty if it cannot be read."""
    return _keep_valid(records.read_mapping(path))


def read_config(experiment: Experiment) -> dict[str, Any]:
    """Return the content of config.yaml, empty if the file is missing, torn or invalid."""
    try:
        if not experiment.config.is_file():  # a pipe would wait for a writer
            return {}
        content = records.read_yaml(experiment.config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and _is_valid_config(content) else {}


def list_commits(experiment: Experiment) -> list[tuple[int, Path]]:
    """Return the step and the COMMIT of each complete checkpoint, the newest step first.

    Raises OSError if the disk fails.
    """
    return [(step, path) for step, path in list_possible_commits(experiment) if path.exists()]


def list_possible_commits(experiment: Experiment) -> list[tuple[int, Path]]:
    """Return the step and the COMMIT of each checkpoint, also if it has none yet; newest first.

    Raises OSError if the disk fails.
    """
    try:
        entries = list(experiment.checkpoints.iterdir())
    except FileNotFoundError:
        return []
    commits = [(step_of(entry.name), entry / COMMIT) for entry in entries]
    return sorted(((step, path) for step, path in commits if step is not None), reverse=True)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl or events.jsonl; None if it is torn or has no step."""
    row = row_files.parse_row(line)
    checked = _keep_valid(row) if row else {}
    return checked if "step" in checked else None


def read_last_rows(path: Path, size: int) -> list[dict[str, Any]]:
    """Return the valid rows in the last `size` bytes of metrics.jsonl or events.jsonl."""
    valid = map(_keep_valid, row_files.read_tail(path, size))
    return [row for row in valid if "step" in row]


def mean_loss(row: dict[str, Any]) -> float:
    """Return the mean loss since the previous row; in a row of an old version, the step's loss."""
    return row.get("train/loss_mean", row["train/loss"])


def _is_valid_config(content: dict[str, Any]) -> bool:
    """Return whether the content of a config.yaml has the types that `write_config` writes."""
    identity = content.get("identity", {})
    mappings = [identity, *(content.get(key, {}) for key in ("options", "settled", "defaults"))]
    if isinstance(identity, dict):
        mappings += [identity.get("options", {}), identity.get("inputs", {})]
    ids = [content.get(key, "0") for key in ("run", "launch")]  # used in names of directories
    return (
        all(isinstance(mapping, dict) for mapping in mappings)
        and isinstance(content.get("model_dir", ""), str)
        and isinstance(content.get("launched_by", []), list)
        and all(isinstance(id_, str) and _ID.fullmatch(id_) for id_ in ids)
    )


def _keep_valid(content: dict[str, Any]) -> dict[str, Any]:
    return {
        one_line(name): _escape_texts(value)
        for name, value in content.items()
        if _has_type(name, value)
    }


def _has_type(name: str, value: object) -> bool:
    """Return whether a value has the type that its name requires; unknown names allow any."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _COUNTS:
        return type(value) is int and 0 <= value < _LARGEST
    if "/" in name or name == "epoch":  # a figure
        return type(value) is float or (type(value) is int and abs(value) < _LARGEST)
    return True


def _escape_texts(value: Any) -> Any:
    """Return a value with its texts escaped and its numbers limited, so that it can be printed."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {one_line(name): _escape_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escape_texts(item) for item in value]
    if type(value) is int and abs(value) >= _LARGEST:
        return math.inf if value > 0 else -math.inf
    return value
