"""Write and hash the files of one split of a token store, and continue after an interruption.

The files depend only on documents and tokenizer, so an interruption does not change them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lib.core import commands, file_identity, manifest, reading, records
from lib.core.errors import ArtifactError
from lib.core.hashing import HashedFile
from lib.tokens.dataset import Dataset

PROGRESS = "progress.json"
_SAVE_PROGRESS_S = 20.0


class StoreContents(NamedTuple):
    """Describes the files of a store for its manifest.

    counts: split → its counts. files: manifest entries. facts: further entries of the store's
    summary. leftovers: files to delete before the store is published.
    """

    counts: dict[str, dict[str, int]]
    files: list[dict[str, Any]]
    facts: dict[str, Any]
    leftovers: list[Path]


class SplitWriter:
    """Writes the tokens and ends of one split, and continues from the progress of a killed run."""

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        self._progress = directory / f"{name}.{PROGRESS}"
        self._directory = directory
        self.name = name
        self._dataset = dataset
        self._dtype = np.dtype(dtype).newbyteorder("<")
        # The fingerprint of a foreign dataset covers only both ends of each shard.
        self._text = "" if dataset.is_of_stage_02 else file_identity.fingerprint(dataset.identities)
        self._earlier = _read_progress(self._progress)
        if self._earlier.get("text", "") != self._text or not self.is_valid_note(self._earlier):
            self._earlier = {}
        self.documents = self._earlier.get("documents", 0)
        self.tokens = self._earlier.get("tokens", 0)
        self._sinks = [
            Sink(directory / f"{name}.tokens.bin", self.tokens * self._dtype.itemsize),
            Sink(directory / f"{name}.ends.bin", self.documents * 8),
        ]
        self._saved = time.monotonic()

    def is_valid_note(self, note: dict[str, Any]) -> bool:
        """Return whether a progress note has the form of `progress_note`, or is empty."""
        return all(
            type(note.get(key, 0)) is int and note.get(key, 0) >= 0
            for key in ("documents", "tokens")
        )

    def append(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents. ids: uint32 [tokens]; lengths: int64 [documents]."""
        tokens, ends = self._sinks[:2]
        tokens.write(ids.astype(self._dtype))
        ends.write((self.tokens + np.cumsum(lengths)).astype("<i8"))
        self.tokens += len(ids)
        self.documents += len(lengths)

    def save_if_due(self) -> None:
        """Save progress if the last save was long enough ago."""
        if time.monotonic() - self._saved > _SAVE_PROGRESS_S:
            self.save()

    def save(self) -> None:
        """Flush the files to disk and save progress, so that another run can continue."""
        for sink in self._sinks:
            sink.sync()
        manifest.write_json(self._progress, self.progress_note())
        self._saved = time.monotonic()

    def progress_note(self) -> dict[str, Any]:
        """Return the progress from which another run can continue."""
        return {"documents": self.documents, "tokens": self.tokens, "text": self._text}

    def manifest_counts(self) -> dict[str, int]:
        """Return the counts of the split for the manifest."""
        return {"tokens": self.tokens, "documents": self.documents}

    def close(self) -> list[dict[str, Any]]:
        """Close the files and return their manifest entries."""
        return [sink.close() for sink in self._sinks]


class Sink:
    """Writes and hashes a file, after the first `keep` bytes if the file exists already."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._file = HashedFile(path, keep=keep)

    @property
    def bytes(self) -> int:
        """Return the length of the file so far."""
        return self._file.bytes

    def write(self, array: np.ndarray) -> None:
        """Append an array."""
        if array.size:
            self._file.write(np.ascontiguousarray(array).data.cast("B"))

    def sync(self) -> None:
        """Flush the file to disk."""
        self._file.sync()

    def close(self) -> dict[str, Any]:
        """Close the file and return its manifest entry, after reading the file back.

        Raises ArtifactError if the file does not contain what was written.
        """
        self.sync()
        self._file.close()
        entry = {
            "path": self.path.name,
            "bytes": self.bytes,
            "digest": self._file.digest(),
        }
        if damage := manifest.describe_damage(self.path, entry, deep=True):
            raise ArtifactError(
                f"{self.path} does not read back as it was written",
                found=damage,
                hint="the disk may be failing (see `dmesg`), or another process wrote to the "
                "file. To build it again:",
                run=commands.as_typed(),
            )
        return entry


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        note = reading.with_retries(lambda: records.read_json(path), path)
    except (OSError, ValueError):  # the note does not exist, or is torn
        return {}
    return note if isinstance(note, dict) else {}
