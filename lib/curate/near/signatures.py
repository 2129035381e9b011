"""Keep the signatures of a dataset beside it, and read those of an earlier dataset.

`near/` in a dataset contains three files for each split, with one entry per kept row: the band
keys, the digest of the content and the number of the row in the split. `parameters.json` contains
what the keys depend on, and how the rows were changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import artifacts, commands, hashing, manifest, records
from lib.core.errors import ArtifactError, UsageError
from lib.curate import shingles
from lib.curate.disk_array import DiskArray
from lib.curate.near import minhash
from lib.curate.near.minhash import Bands

if TYPE_CHECKING:
    import numpy as np

DIRECTORY = "near"
_KIND = "dataset/1"
_PARAMETERS = "parameters.json"
_CHANGES = "changes of rows"
FILES = _KEYS, _DIGESTS, _ROWS = "keys", "digests", "rows"
# An older dataset has no record of how its rows were changed; only masks did.
_OLD_CHANGES = "mask"


def describe_parameters(words: int, bands: Bands) -> dict[str, Any]:
    """Return the values that the band keys depend on, by option or name."""
    return {
        "--near-words": words,
        "--near-bands": bands.number,
        "--near-band-size": bands.size,
        "version of the n-grams": shingles.VERSION,
        "version of the signatures": minhash.VERSION,
    }


class SignatureFiles:
    """Writes the signatures of the kept rows of a dataset. directory: the dataset."""

    def __init__(self, directory: Path, splits: Sequence[str]) -> None:
        self._home = directory / DIRECTORY
        self._home.mkdir(exist_ok=True)
        self._files = {
            (split, name): (self._home / f"{split}.{name}").open("wb")
            for split in splits
            for name in FILES
        }

    def append(self, split: str, values: Mapping[str, np.ndarray]) -> None:
        """Append the entries of some rows. values: one array per key of FILES, a row per entry."""
        for name in FILES:
            self._files[split, name].write(values[name].tobytes())

    def finish(self, parameters: Mapping[str, Any], changes: Mapping[str, Any]) -> list[Path]:
        """Write the description, and return the paths of all files.

        changes: the identity of the steps that have changed the rows.
        """
        for file in self._files.values():
            file.close()
        manifest.write_json(self._home / _PARAMETERS, {**parameters, _CHANGES: changes})
        return sorted(self._home.iterdir())


class EarlierDataset:
    """Reads the signatures of a dataset that was built with --dedup near.

    Raises ArtifactError if the dataset has no signatures or is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self._directory = directory
        self._home = directory / DIRECTORY
        self.manifest = manifest.read_manifest(directory, _KIND, "the dataset")
        self.parameters = records.read_mapping(self._home / _PARAMETERS)
        if not self.parameters:
            raise ArtifactError(
                f"--near-against {directory}: the dataset has no signatures",
                expected=f"the directory {self._home}, which --dedup near writes",
                hint="curate that dataset again with --dedup near",
            )
        self.splits: list[str] = list(self.manifest["summary"]["splits"])
        self._shards = artifacts.find_dataset_files(directory).splits
        self._rows = {split: self.open(split, _ROWS) for split in self.splits}

    @property
    def changes(self) -> dict[str, Any]:
        """Return the identity of the steps that have changed the rows."""
        options = self.manifest["identity"]["options"]
        old = {name: options[name] for name in options if name.startswith(_OLD_CHANGES)}
        changes: dict[str, Any] = self.parameters.get(_CHANGES, old)
        return changes

    def identify(self) -> dict[str, Any]:
        """Return the name and the content, and not the path."""
        digests = {entry["path"]: entry["digest"] for entry in self.manifest["files"]}
        return {"name": self.name, "content": hashing.fingerprint(digests)}

    def require_undamaged(self) -> None:
        """Raise ArtifactError if the signatures do not have the recorded content."""
        files = [
            entry for entry in self.manifest["files"] if entry["path"].startswith(f"{DIRECTORY}/")
        ]
        problems = [
            *manifest.find_damage(self._directory, self.manifest, deep=False),
            *manifest.find_damage(self._directory, {"files": files}, deep=True),
        ]
        if problems:
            raise ArtifactError(f"{self._directory} is damaged", found="\n".join(problems[:3]))

    def require_parameters(self, ours: Mapping[str, Any]) -> None:
        """Raise UsageError if the signatures were computed with other parameters."""
        theirs = self.parameters
        if not (changed := [name for name, value in ours.items() if theirs.get(name) != value]):
            return
        options = [name for name in changed if name.startswith("--")]
        raise UsageError(
            f"--near-against {self._directory} was built with other options for its signatures",
            expected=", ".join(f"{name} {ours[name]}" for name in changed),
            found=", ".join(f"{name} {theirs.get(name)}" for name in changed),
            hint=f"use the options of {self.name}, or curate it again with those of this command",
            run=commands.as_typed(*(word for name in options for word in (name, theirs[name])))
            if options == changed
            else "",
        )

    def count_rows(self) -> int:
        """Return the number of entries of all splits."""
        return sum(map(len, self._rows.values()))

    def open(self, split: str, name: str, width: int = 0) -> DiskArray:
        """Return an array of a split (uint64).

        name: one of FILES. width: number of columns, 0 for an array of one dimension.
        """
        import numpy as np

        return DiskArray(self._home / f"{split}.{name}", np.uint64, width=width, is_fixed=True)

    def list_shards(self, split: str) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield the shards of a split, with the row in the shard of each entry (int64)."""
        import numpy as np

        rows = self._rows[split]
        first = 0
        start = 0
        for shard, path in zip(
            self.manifest["summary"]["splits"][split]["shards"], self._shards[split], strict=True
        ):
            # A signed number would let NumPy convert all entries to float64.
            stop = int(np.searchsorted(rows.values, np.uint64(first + shard["rows"])))
            yield path, rows.values[start:stop].astype(np.int64) - first
            rows.release()
            first += shard["rows"]
            start = stop

    def describe_row(self, number: int) -> dict[str, Any]:
        """Return the place of a row. number: of its entry, from 0."""
        for split, rows in self._rows.items():
            if number < len(rows):
                return {"split": split, "row": int(rows.values[number]), "dataset": self.name}
            number -= len(rows)
        raise IndexError(number)
