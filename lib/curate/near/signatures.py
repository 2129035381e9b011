"""Keep the signatures of a dataset beside it, and read those of an earlier dataset.

`near/` in a dataset contains four files for each split, with one entry per kept row: the band keys,
the digest of the content, the place (number of the file, position in it) and the number of the row
in the split. `paths.json` lists the files. `parameters.json` contains the options that the keys
depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import artifacts, commands, hashing, manifest, records
from lib.core.errors import ArtifactError, Problems, UsageError
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import RowOptions
from lib.curate import shingles
from lib.curate.disk_array import DiskArray
from lib.curate.masks import mask_options
from lib.curate.near import minhash

if TYPE_CHECKING:
    import numpy as np

DIRECTORY = "near"
_KIND = "dataset/1"
_PARAMETERS = "parameters.json"
_PATHS = "paths.json"
_KEYS, _DIGESTS, _PLACES, _ROWS = FILES = "keys", "digests", "places", "rows"


def describe_parameters(row_options: RowOptions) -> dict[str, int]:
    """Return the values that the band keys depend on, by option or name."""
    return {
        "--near-words": row_options.near_words,
        "--near-bands": row_options.near_bands,
        "--near-band-size": row_options.near_band_size,
        "version of the n-grams": shingles.VERSION,
        "version of the signatures": minhash.VERSION,
    }


class SignatureWriter:
    """Writes the signatures of the kept rows of a dataset. directory: the dataset."""

    def __init__(self, directory: Path, splits: Sequence[str]) -> None:
        self._root = directory
        home = directory / DIRECTORY
        home.mkdir(exist_ok=True)
        self._files = {
            (split, name): (home / f"{split}.{name}").open("ab")
            for split in splits
            for name in FILES
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file by its path in the dataset, after flushing it."""
        sizes = {}
        for (split, name), file in self._files.items():
            file.flush()
            sizes[f"{DIRECTORY}/{split}.{name}"] = file.tell()
        return sizes

    def files(self) -> list[Any]:
        """Return the open files."""
        return list(self._files.values())

    def append(self, split: str, values: Mapping[str, np.ndarray]) -> None:
        """Append the entries of some rows. values: one array per key of FILES, a row per entry."""
        for name in FILES:
            self._files[split, name].write(values[name].tobytes())

    def finish(
        self, row_options: RowOptions, paths: Sequence[tuple[str, str]]
    ) -> list[dict[str, Any]]:
        """Write the descriptions, and return the manifest entries of all files."""
        self.close()
        home = self._root / DIRECTORY
        manifest.write_json(home / _PARAMETERS, describe_parameters(row_options))
        manifest.write_json(home / _PATHS, paths)
        return [manifest.file_entry(self._root, path) for path in sorted(home.iterdir())]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


@dataclass(frozen=True)
class ShardRows:
    """Describes the entries of one shard.

    entries: the row number in the split of each entry of the split. start, count: the range of the
    entries of this shard. first: number of the shard's first row in the split.
    """

    path: Path
    entries: DiskArray
    start: int
    count: int
    first: int

    def list_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows in the shard (int64). numbers: of its entries, from 0."""
        import numpy as np

        rows = self.entries.values[self.start + numbers].astype(np.int64) - self.first
        self.entries.release()
        return rows


class EarlierDataset:
    """Reads the signatures of a dataset that was built with --dedup near.

    is_verified: whether the files were already compared with their digests. Raises ArtifactError if
    the dataset is damaged.
    """

    def __init__(self, directory: Path, is_verified: bool) -> None:
        self.name = directory.name
        self._home = directory / DIRECTORY
        self.manifest = manifest.read_manifest(directory, _KIND, "the dataset")
        files = [
            entry for entry in self.manifest["files"] if entry["path"].startswith(f"{DIRECTORY}/")
        ]
        problems = [
            *manifest.find_damage(directory, self.manifest, deep=False),
            *([] if is_verified else manifest.find_damage(directory, {"files": files}, deep=True)),
        ]
        if problems:
            raise ArtifactError(f"{directory} is damaged", found="\n".join(problems[:3]))
        self.paths: list[tuple[str, str]] = [
            (path, source) for path, source in records.read_json(self._home / _PATHS)
        ]
        self.splits: list[str] = list(self.manifest["summary"]["splits"])
        self._shards = artifacts.find_dataset_files(directory).splits

    def open(self, split: str, name: str, width: int = 0) -> DiskArray:
        """Return an array of a split (uint64).

        name: a key of FILES. width: number of columns, 0 for an array of one dimension.
        """
        import numpy as np

        return DiskArray(self._home / f"{split}.{name}", np.uint64, width=width, is_fixed=True)

    def list_ranges(self, split: str) -> Iterator[ShardRows]:
        """Yield the entries of a split, shard by shard."""
        import numpy as np

        rows = self.open(split, _ROWS)
        first = 0
        start = 0
        for shard, path in zip(
            self.manifest["summary"]["splits"][split]["shards"], self._shards[split], strict=True
        ):
            # A signed number would let NumPy convert all entries to float64.
            stop = int(np.searchsorted(rows.values, np.uint64(first + shard["rows"])))
            yield ShardRows(path, rows, start, stop - start, first)
            first += shard["rows"]
            start = stop


def require_earlier(row_options: RowOptions) -> None:
    """Raise UsageError or ArtifactError if rows cannot be compared with earlier datasets."""
    problems = Problems()
    for directory in row_options.near_against if row_options.drops_near else ():
        problems.collect(partial(require_parameters, directory, row_options))
    problems.raise_if_any()
    if row_options.near_against:
        are_masked(row_options)


def identify_earlier(row_options: RowOptions) -> dict[str, Any]:
    """Return the entries of --near-against in the identity of a dataset, {} without the option."""
    if not row_options.near_against:
        return {}
    return {"near_against": identify_datasets(row_options.near_against)}


def require_parameters(directory: Path, row_options: RowOptions) -> None:
    """Raise UsageError if the signatures of a dataset were computed with other parameters.

    Raises ArtifactError if it has no signatures.
    """
    manifest.read_manifest(directory, _KIND, "the dataset")
    theirs = records.read_mapping(directory / DIRECTORY / _PARAMETERS)
    if not theirs:
        raise ArtifactError(
            f"--near-against {directory}: the dataset has no signatures",
            expected=f"the directory {directory / DIRECTORY}, which --dedup near writes",
            hint="build that dataset again with --dedup near",
        )
    ours = describe_parameters(row_options)
    if changed := [name for name, value in ours.items() if theirs.get(name) != value]:
        options = [name for name in changed if name.startswith("--")]
        raise UsageError(
            f"--near-against {directory} was built with other options for its signatures",
            expected=", ".join(f"{name} {ours[name]}" for name in changed),
            found=", ".join(f"{name} {theirs.get(name)}" for name in changed),
            hint=f"use the options of {directory.name}, or build it again with those of this build",
            run=commands.as_typed(*(word for name in options for word in (name, theirs[name])))
            if options == changed
            else "",
        )


def are_masked(row_options: RowOptions) -> bool:
    """Return whether the rows of the earlier datasets are masked.

    Raises UsageError if some of them are masked in another way than this dataset.
    """
    manifests = [
        manifest.read_manifest(directory, _KIND, "the dataset")
        for directory in row_options.near_against
    ]
    return mask_options.are_masked(
        [content["identity"]["options"] for content in manifests], row_options
    )


def identify_datasets(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the identity of each dataset, by its name and content and not by its path.

    Raises UsageError if two have the same name.
    """
    identities: list[dict[str, Any]] = []
    for directory in directories:
        if directory.name in {identity["name"] for identity in identities}:
            raise UsageError(
                f"--near-against: two datasets are named {directory.name}",
                found=", ".join(str(path) for path in directories if path.name == directory.name),
                expected="different names of the directories: rename one of them",
            )
        files = manifest.read_manifest(directory, _KIND, "the dataset")["files"]
        digests = {entry["path"]: entry["digest"] for entry in files}
        identities.append({"name": directory.name, "content": hashing.fingerprint(digests)})
    return identities


def list_paths(files: Sequence[InputFile]) -> list[tuple[str, str]]:
    """Return the path and the source of each file."""
    return [(file.path, file.source) for file in files]
