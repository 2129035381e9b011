"""The files of one split of a token store: written, hashed, and taken up again after a kill.

They depend on nothing but documents and tokenizer, so where a run was cut leaves no trace.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lib.core import commands, file_identity, hashing, log, manifest, reading, records, units
from lib.core.errors import ArtifactError
from lib.core.progress import Progress
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder

PROGRESS = "progress.json"
_SAVE_PROGRESS_S = 20.0


class Written(NamedTuple):
    """What was written: counts by split, manifest entries, and what became of conversations."""

    counts: dict[str, dict[str, int]]
    files: list[dict[str, Any]]
    chat: dict[str, Any] | None = None


class SplitWriter:
    """Writes tokens and ends of one split; takes up what a killed run had made durable."""

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        self._progress = directory / f"{name}.{PROGRESS}"
        self._directory = directory
        self.name = name
        self._dataset = dataset
        self._dtype = np.dtype(dtype).newbyteorder("<")
        # Of a dataset made elsewhere the fingerprint knows only both ends of each shard.
        self._text = "" if dataset.ours else file_identity.fingerprint(dataset.stamps)
        self._earlier = _read_progress(self._progress)
        if self._earlier.get("text", "") != self._text or not self.is_sound(self._earlier):
            self._earlier = {}
        self.documents = self._earlier.get("documents", 0)
        self.tokens = self._earlier.get("tokens", 0)
        self._sinks = [
            Sink(directory / f"{name}.tokens.bin", self.tokens * self._dtype.itemsize),
            Sink(directory / f"{name}.ends.bin", self.documents * 8),
        ]
        self._saved = time.monotonic()

    def is_sound(self, noted: dict[str, Any]) -> bool:
        """Tell whether a note of progress has what `noted` gives; empty where there is none."""
        return all(
            type(noted.get(key, 0)) is int and noted.get(key, 0) >= 0
            for key in ("documents", "tokens")
        )

    def append(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Write documents one after the other. ids: uint32 [tokens]; lengths: int64 [documents]."""
        tokens, ends = self._sinks[:2]
        tokens.write(ids.astype(self._dtype))
        ends.write((self.tokens + np.cumsum(lengths)).astype("<i8"))
        self.tokens += len(ids)
        self.documents += len(lengths)

    def save_if_due(self) -> None:
        """Make what is there durable, now and then."""
        if time.monotonic() - self._saved > _SAVE_PROGRESS_S:
            self.save()

    def save(self) -> None:
        """Make what is there durable, so that another run can go on after it."""
        for sink in self._sinks:
            sink.sync()
        manifest.write_json(self._progress, self.noted())
        self._saved = time.monotonic()

    def noted(self) -> dict[str, Any]:
        """Return what a run has to know that goes on after this one."""
        return {"documents": self.documents, "tokens": self.tokens, "text": self._text}

    def counts(self) -> dict[str, int]:
        """Return what the manifest says of the split."""
        return {"tokens": self.tokens, "documents": self.documents}

    def close(self) -> list[dict[str, Any]]:
        """Close the files and return their manifest entries."""
        return [sink.close() for sink in self._sinks]


class TextWriter(SplitWriter):
    """Writes the documents of a dataset of text."""

    def run(self, encoder: Encoder, bar: Progress) -> None:
        """Tokenise the documents that are not there yet."""
        if self.documents:
            log.info(
                f"  going on after {units.counted(self.documents, 'document')} of an "
                "interrupted run"
            )
        for texts in self._dataset.documents(self.name, self.documents):
            self.append(*encoder.encode(texts))
            bar.advance(sum(map(len, texts)))
            self.save_if_due()
        self.save()


class Sink:
    """Hashes a file while it writes it; the first `keep` bytes of an old one stay."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.bytes = keep
        self._hasher = hashing.new()
        self._file = path.open("r+b" if keep else "w+b")
        self._file.truncate(keep)
        while chunk := self._file.read(1 << 22):
            self._hasher.update(chunk)

    def write(self, array: np.ndarray) -> None:
        """Write an array behind what is there."""
        if not array.size:
            return
        data = np.ascontiguousarray(array).data.cast("B")
        self._hasher.update(data)
        self.bytes += self._file.write(data)

    def sync(self) -> None:
        """Make what was written durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> dict[str, Any]:
        """Close the file and return its manifest entry, after reading the file back.

        Raises ArtifactError when it holds anything else than was written.
        """
        self.sync()
        self._file.close()
        entry = {
            "path": self.path.name,
            "bytes": self.bytes,
            "digest": hashing.digest(self._hasher),
        }
        if found := manifest.describe_damage(self.path, entry, deep=True):
            raise ArtifactError(
                f"{self.path} does not read back as it was written",
                found=found,
                hint="the disk may be failing (`dmesg` tells), or something else "
                "wrote there; it is made anew by:",
                run=commands.as_typed(),
            )
        return entry


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        noted = reading.with_retries(lambda: records.read_json(path), path)
    except (OSError, ValueError):  # of one that is not there, or is torn
        return {}
    return noted if isinstance(noted, dict) else {}
