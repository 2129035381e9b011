"""Write a dataset directory and its errors.jsonl from the results of the work units, in order.

Every few seconds the writer syncs its files and records its progress in `unfinished/progress.json`.
After a kill, the next run truncates the files to the last recorded progress and continues there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import hashing, manifest
from lib.corpus import duplicates, work_units
from lib.corpus.documents import SKIPPED_FILE
from lib.corpus.dropped import DROPPED_FILE
from lib.corpus.duplicates import DuplicateFinder
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.scan import TreeEntry
from lib.corpus.shards import Flusher
from lib.corpus.split_shards import SplitShards, restore_progress
from lib.corpus.tally import ERRORS, Tally, format_problem
from lib.corpus.work_units import UnitResult

if TYPE_CHECKING:
    import numpy as np

WORK = "unfinished"
PARTS = f"{WORK}/parts"  # the output of the workers
NOTE_BYTES = 256_000_000
NOTE_SECONDS = 10.0
_PROGRESS = f"{WORK}/progress.json"
_DUPLICATES = f"{WORK}/duplicates"
_VERSION = 5  # the format of the progress record; after a change, a build starts anew


class DatasetWriter:
    """Writes a dataset: a single split into the directory itself, two splits into subdirectories.

    units: number of units added so far. duplicates: number of rows dropped because they equal an
    earlier one.

    >>> with DatasetWriter(directory, row_options) as dataset:
    ...     for result in pool.run(units[dataset.units:]):
    ...         dataset.add(result)
    ...     files = dataset.finish()
    """

    def __init__(self, directory: Path, row_options: RowOptions) -> None:
        before = restore_progress(directory, _PROGRESS, _VERSION, kept_prefix=_PROGRESS)
        shutil.rmtree(directory / PARTS, ignore_errors=True)
        self.units: int = before.get("units", 0)
        self.tally = Tally.from_json(before["tally"]) if before else Tally()
        self.duplicates: int = before.get("duplicates", 0)
        (directory / PARTS).mkdir(parents=True)
        self._directory = directory
        self._flusher = Flusher()
        self._is_chat = row_options.format == CHAT
        schema = work_units.make_part_schema(row_options)
        self._dropped = (directory / DROPPED_FILE).open("ab") if row_options.drops_rows else None
        self._shards = SplitShards(
            directory, row_options.splits, schema, self._flusher, before.get("shards", {})
        )
        self._errors = (directory / ERRORS).open("ab")
        self._lines_before: int = before.get("lines_before", 0)
        self._rows_before: int = before.get("rows_before", 0)
        self._finder = (
            DuplicateFinder(directory / _DUPLICATES) if row_options.drops_duplicates else None
        )
        self._unnoted = 0
        self._noted_at = time.monotonic()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._flusher.close()
        self._errors.close()
        if self._dropped:
            self._dropped.close()
        if self._finder:
            self._finder.close()
        self._shards.close()

    @property
    def errors(self) -> Path:
        """Return the path of errors.jsonl after flushing it."""
        if not self._errors.closed:
            self._errors.flush()
        return self._directory / ERRORS

    @property
    def rows(self) -> dict[str, int]:
        """Return the number of rows so far, by split."""
        return self._shards.rows

    def note_skipped(self, entries: Iterable[TreeEntry]) -> None:
        """Write the entries that the scan has skipped to errors.jsonl, before the first unit."""
        for entry in entries:
            self._errors.write(
                format_problem(
                    entry.path,
                    None,
                    None,
                    entry.skipped,
                    "skipped by the scan of the directory",
                    SKIPPED_FILE,
                )
            )
            self.tally.problems[entry.skipped] += 1

    def add(self, result: UnitResult) -> None:
        """Add the result of the next unit and delete its parts, unless they are kept for a merge.

        Units must be added in order. Raises ArtifactError if a kept part is damaged.
        """
        work_units.require_undamaged(result)
        if result.unit.begins:
            self._lines_before = 0
            self._rows_before = 0
        _copy_lines(result.unit.part("errors"), self._errors, "line", self._lines_before)
        dropped = result.unit.part("dropped")
        if self._dropped and dropped.exists():  # parts of an earlier version lack this file
            _copy_lines(dropped, self._dropped, "position", self._rows_before)
        for split, writer in self._shards.writers.items():
            writer.append(
                result.unit.part(split),
                result.rows[split],
                result.text_bytes[split],
                self._drop_duplicates(result, split),
                self._lines_before if self._is_chat else 0,
            )
            self._unnoted += result.text_bytes[split]
        if not result.digests:
            for part in result.unit.parts():
                work_units.release_part(part)
        self.tally.add(result.tally, self._lines_before)
        self._lines_before += result.lines_of_part
        self._rows_before += result.rows_of_part
        self.units += 1
        if self._unnoted > NOTE_BYTES or time.monotonic() > self._noted_at + NOTE_SECONDS:
            self._note_progress()

    def finish(self) -> list[dict[str, Any]]:
        """Rename and verify the shards, and return the manifest entries of all files."""
        files = self._shards.finish()
        self._errors.close()
        if self._dropped:
            self._dropped.close()
            files.append(manifest.file_entry(self._directory, self._directory / DROPPED_FILE))
        shutil.rmtree(self._directory / WORK)
        return [*files, manifest.file_entry(self._directory, self.errors)]

    def summary(self) -> dict[str, Any]:
        """Return the summary for the manifest."""
        tally = self.tally
        return {
            **self._shards.summarize(),
            "documents": tally.documents,
            "short": tally.short,
            "duplicates": self.duplicates,
            **({"extracted": dict(sorted(tally.extracted.items()))} if tally.extracted else {}),
            "replaced": tally.replaced,
            "failed_files": len(tally.failed),
            "problems": dict(sorted(tally.problems.items())),
            **({"chat": tally.chat.summary(tally.problems)} if self._is_chat else {}),
        }

    def _drop_duplicates(self, result: UnitResult, split: str) -> np.ndarray | None:
        """Return which rows of a part are kept (bool [rows]; None: all), and list the others."""
        if not (self._finder and self._dropped and result.rows[split]):
            return None
        selection = self._finder.select(result, split, self._rows_before)
        self._errors.writelines(selection.problems)
        self._dropped.writelines(selection.dropped)
        if selection.problems:
            self.tally.problems[duplicates.KIND] += len(selection.problems)
        self.duplicates += len(selection.dropped)
        return None if selection.is_kept.all() else selection.is_kept

    def _note_progress(self) -> None:
        self._errors.flush()
        for file in (
            self._errors,
            *([self._dropped] if self._dropped else []),
            *(self._finder.files.values() if self._finder else []),
        ):
            file.flush()
            self._flusher.sync(file)
        states = self._shards.state()
        sizes = {ERRORS: self._errors.tell()}
        if self._dropped:
            sizes[DROPPED_FILE] = self._dropped.tell()
        if self._finder:
            sizes |= {f"{WORK}/{name}": file.tell() for name, file in self._finder.files.items()}
        sizes |= self._shards.list_sizes(states)
        progress = {
            "version": _VERSION,
            "units": self.units,
            "tally": self.tally.to_json(),
            "shards": states,
            "duplicates": self.duplicates,
            "lines_before": self._lines_before,
            "rows_before": self._rows_before,
            "files": sizes,
        }
        record = hashing.seal_record(progress)  # a copy, because the tally changes later
        self._flusher.then(lambda: manifest.write_json(self._directory / _PROGRESS, record))
        self._unnoted = 0
        self._noted_at = time.monotonic()


def _copy_lines(part: Path, file: BinaryIO, key: str, before: int) -> None:
    """Append the JSON Lines of a part to a file.

    key: a number that counts from the beginning of a span. before: added to this number, so that it
    counts from the beginning of the file.
    """
    with part.open("rb") as lines:
        for text in lines:
            if before:
                content = json.loads(text)
                if content[key] is not None:
                    content[key] += before
                text = json.dumps(content).encode() + b"\n"
            file.write(text)
