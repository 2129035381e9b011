"""Write the shards of all splits of a dataset, and continue at the recorded progress after a kill.

A dataset with one split has its shards in its own directory, and with two in one directory each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, manifest, reading, records
from lib.core.errors import ArtifactError, is_of_disk
from lib.corpus import shards
from lib.corpus.shards import Flusher, ShardWriter

if TYPE_CHECKING:
    import pyarrow as pa


class SplitShards:
    """Writes the shards of each split.

    before: to continue a stopped run, the result of its `state`.
    """

    def __init__(
        self,
        directory: Path,
        splits: Sequence[str],
        schema: pa.Schema,
        flusher: Flusher,
        before: Mapping[str, Iterable[dict[str, Any]]],
    ) -> None:
        self._directory = directory
        self._homes = {
            split: directory / split if len(splits) > 1 else directory for split in splits
        }
        self.writers = {
            split: ShardWriter(home, split, schema, flusher, before.get(split, ()))
            for split, home in self._homes.items()
        }

    @property
    def rows(self) -> dict[str, int]:
        """Return the number of rows so far, by split."""
        return {split: writer.rows for split, writer in self.writers.items()}

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """Return the state from which a later run can continue, and sync the open shards."""
        return {split: writer.state() for split, writer in self.writers.items()}

    def list_sizes(self, state: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, int]:
        """Return the bytes of each shard in a state, by its path in the directory."""
        return {
            (self._homes[split] / shard["name"]).relative_to(self._directory).as_posix(): shard[
                "bytes"
            ]
            for split, listed in state.items()
            for shard in listed
        }

    def finish(self) -> list[dict[str, Any]]:
        """Rename and verify the shards, and return the manifest entries of all files."""
        files = []
        for split, home in self._homes.items():
            prefix = home.relative_to(self._directory)
            files += [
                entry | {"path": (prefix / entry["path"]).as_posix()}
                for entry in self.writers[split].finish()
            ]
        if len(self._homes) > 1:
            path = self._directory / "dataset_dict.json"
            manifest.write_json(path, {"splits": sorted(self._homes)})
            files.append(manifest.file_entry(self._directory, path))
        return files

    def summarize(self) -> dict[str, Any]:
        """Return the rows, bytes of text and shards of each split, for the manifest."""
        splits = {split: writer.summary() for split, writer in self.writers.items()}
        return {
            "rows": sum(split["rows"] for split in splits.values()),
            "text_bytes": sum(split["text_bytes"] for split in splits.values()),
            "splits": splits,
        }

    def close(self) -> None:
        """Close the open shards without finishing them."""
        for writer in self.writers.values():
            writer.close()


def restore_progress(
    directory: Path, record: str, version: int, kept_prefix: str
) -> dict[str, Any]:
    """Truncate the files of a dataset to the recorded progress and return it ({}: start anew).

    record: path of the sealed record in the directory, whose `files` lists sizes. version: of the
    record; another one is ignored. kept_prefix: the beginning of the paths that stay, although the
    record does not list them.
    """
    shards.restore_names(directory)
    progress = _read_progress(directory, record, version)
    files = progress.get("files", {})
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in files and not name.startswith(kept_prefix):
            path.unlink()
    for name, size in files.items():
        with (directory / name).open("rb+") as file:
            file.truncate(size)
    if not progress:
        (directory / record).unlink(missing_ok=True)
    return progress


def _read_progress(directory: Path, record: str, version: int) -> dict[str, Any]:
    path = directory / record
    try:
        progress = hashing.open_record(reading.with_retries(lambda: records.read_json(path), path))
        if progress["version"] == version and all(
            records.safe_join(directory, name).stat().st_size >= size
            for name, size in progress["files"].items()
        ):
            return progress
    except (OSError, ValueError, KeyError, ArtifactError) as error:
        if is_of_disk(error):
            raise
    return {}  # nothing was recorded, or a power cut lost data that the record lists
