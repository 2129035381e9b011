"""Keep what the first pass finds out about a unit, on disk.

The files of a unit are `NUMBER.npz` with the fate of each row and the sidecars, `NUMBER.arrow` with
the new columns, `NUMBER.drops` with a line for each dropped row, and the record `NUMBER.json`. The
record is written last and contains the digests of the others, so a unit with a record is complete,
and a later run does not read it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, publish, records
from lib.core.errors import ArtifactError
from lib.curate.reader import Unit

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

KEPT = 0  # the fate of a row that is kept; otherwise 1 + the number of the rule that drops it
FATES = "fates"
RECORD = ".json"
ARRAYS = ".npz"
COLUMNS = ".arrow"
DROPS = ".drops"


@dataclass(frozen=True)
class UnitTask:
    """Describes a unit that a worker shows to the steps. directory: for the files of the unit."""

    unit: Unit
    directory: Path


@dataclass(frozen=True)
class UnitRecord:
    """Describes the finished files of a unit.

    path: the common beginning of their paths. alone: by rule, the number of rows that it would drop
    alone. counts: the own counts of the steps, by name.
    """

    path: Path
    digests: dict[str, str]
    alone: dict[str, int]
    counts: dict[str, dict[str, Any]]

    def read_arrays(self) -> Mapping[str, np.ndarray]:
        """Return the fates (uint8 [rows]) and the sidecars."""
        import numpy as np

        with np.load(self.path.with_suffix(ARRAYS), allow_pickle=False) as arrays:
            return dict(arrays)

    def read_columns(self) -> pa.RecordBatch | None:
        """Return the new columns of all rows, None if there are none."""
        import pyarrow as pa

        path = self.path.with_suffix(COLUMNS)
        if path.name not in self.digests:
            return None
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            return stream.read_all().combine_chunks().to_batches()[0]

    def read_drops(self) -> dict[int, Any]:
        """Return the measurement of each dropped row, by its number in the unit."""
        lines = self.path.with_suffix(DROPS).read_bytes().splitlines()
        return dict(map(json.loads, lines))


def locate_record(task: UnitTask) -> Path:
    """Return the path of the record of a unit."""
    return task.directory / f"{task.unit.number:08d}{RECORD}"


def read_record(task: UnitTask) -> UnitRecord | None:
    """Return the record of a unit whose files are complete, otherwise None."""
    path = locate_record(task)
    try:
        content = hashing.open_record(records.read_mapping(path))
    except ValueError:
        return None
    if not content:
        return None
    return UnitRecord(path.with_suffix(""), content["digests"], content["alone"], content["counts"])


def is_undamaged(record: UnitRecord) -> bool:
    """Return whether the files of a unit have the recorded content."""
    paths = {record.path.with_name(name): digest for name, digest in record.digests.items()}
    return all(path.is_file() and hashing.has_digest(path, paths[path]) for path in paths)


def describe_damage(path: Path) -> ArtifactError:
    """Return the error about damaged files of a unit. path: the common beginning of their paths."""
    return ArtifactError(
        f"{publish.find_kept(path)}.* is damaged or gone",
        expected="the content that the first pass wrote",
        hint="delete that directory, and run the same command again",
    )
