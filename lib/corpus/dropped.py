"""Write dropped.jsonl, which lists every dropped row with the rule that drops it.

The line of a duplicate names the kept row that it duplicates. So the places of kept rows are stored
on disk while a dataset is built.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core.paths import escape_path

if TYPE_CHECKING:
    import numpy as np

DROPPED_FILE = "dropped.jsonl"
_PATH_BYTES = 1 << 16  # more than any path as JSON


def format_dropped(
    path: str, position: int | None, rule: str, value: float, duplicate_of: dict[str, Any] | None
) -> bytes:
    """Return a line of dropped.jsonl.

    path: the file, relative to the data folder. position: number of the row in the file, from 1;
    None if an earlier version wrote the part without positions. value: the measurement of the rule.
    duplicate_of: the kept row that this row duplicates.
    """
    line = {
        "path": path,
        "position": position,
        "rule": rule,
        "value": value,
        "duplicate_of": duplicate_of,
    }
    return json.dumps(line).encode() + b"\n"


def format_place(row: Mapping[str, Any]) -> str:
    """Return the place of a row as text.

    row: its path and position, and the name of its dataset if that is an earlier one.
    """
    position = f", row {row['position']:,}" if row["position"] else ""
    place = escape_path(row["path"]) + position
    return f"{place} of {row['dataset']}" if "dataset" in row else place


class KeptPlaces:
    """Stores the file and the position of each kept row, in their order.

    path: the common beginning of the names of both files. New rows are appended, so a resumed build
    first truncates the files to the recorded progress.
    """

    def __init__(self, path: Path) -> None:
        self._paths = path.with_name(f"{path.name}.paths").open("ab+", buffering=0)
        self._places = path.with_name(f"{path.name}.places").open("ab+", buffering=0)
        self._last = ("", 0)

    @property
    def files(self) -> dict[str, Any]:
        """Return the open files by the suffix of their names."""
        return {"paths": self._paths, "places": self._places}

    def append(self, path: str, positions: np.ndarray) -> None:
        """Add rows of a file. positions: uint64 [rows], from 1, or 0 for an unknown position."""
        import numpy as np

        if path != self._last[0]:
            self._last = path, self._paths.seek(0, os.SEEK_END)
            self._paths.write(json.dumps(path).encode() + b"\n")
        places = np.empty((len(positions), 2), np.uint64)
        places[:, 0] = self._last[1]
        places[:, 1] = positions
        self._places.write(places.tobytes())

    def describe_row(self, number: int) -> dict[str, Any]:
        """Return the path and the position of a kept row. number: its index among the kept rows."""
        place = os.pread(self._places.fileno(), 16, 16 * number)
        start = int.from_bytes(place[:8], "little")
        line = os.pread(self._paths.fileno(), _PATH_BYTES, start).partition(b"\n")[0]
        position = int.from_bytes(place[8:], "little") or None
        return {"path": json.loads(line), "position": position}

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()
