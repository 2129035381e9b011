"""Remember on disk where the kept rows of a dataset come from, to name them in dropped.jsonl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_PATH_BYTES = 1 << 16  # more than any path as JSON


class KeptPlaces:
    """Store the file and the position of each row that a decider keeps, in their order.

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
