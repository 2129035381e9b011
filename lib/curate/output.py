"""Write a curated dataset and its dropped.jsonl from the units of the second pass, in order.

Every few seconds the writer syncs its files and records its progress in `unfinished/progress.json`.
After a kill, the next run truncates the files to the last recorded progress and continues there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.core import hashing, manifest
from lib.corpus.shards import Flusher
from lib.corpus.split_shards import SplitShards, restore_progress
from lib.curate.row_tally import RowTally
from lib.curate.schema import RowSchema
from lib.curate.second_pass import WrittenUnit
from lib.curate.step import Counts, CurationStep

DROPPED = "dropped.jsonl"
WORK = "unfinished"
_PROGRESS = f"{WORK}/progress.json"
_VERSION = 1  # of the progress record; after a change, the second pass starts anew
_NOTE_BYTES = 256_000_000
_NOTE_SECONDS = 10.0


class DatasetOutput:
    """Writes a dataset: a single split into the directory itself, two splits into subdirectories.

    units: number of units added so far. tally: counts of their rows. dropped: number of dropped
    rows by rule. counts: the own counts of the steps that change rows, by name.

    >>> with DatasetOutput(directory, splits, schema, steps) as output:
    ...     for written in pool.run(tasks[output.units:]):
    ...         output.add(written)
    ...     files = output.finish()
    """

    def __init__(
        self,
        directory: Path,
        splits: Sequence[str],
        schema: RowSchema,
        steps: Sequence[CurationStep],
    ) -> None:
        before = restore_progress(directory, _PROGRESS, _VERSION, kept_prefix=f"{WORK}/")
        self.units: int = before.get("units", 0)
        self.tally = RowTally.from_json(before["tally"]) if before else RowTally()
        self.dropped: Counter[str] = Counter(before.get("dropped", {}))
        self.counts: dict[str, Counts] = before.get("counts", {})
        self._steps = {step.name: step for step in steps}
        self._directory = directory
        self._flusher = Flusher()
        self._shards = SplitShards(
            directory, splits, schema.output, self._flusher, before.get("shards", {})
        )
        self._dropped = (directory / DROPPED).open("ab")
        self._unnoted = 0
        self._noted_at = time.monotonic()

    def __enter__(self) -> DatasetOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self._flusher.close()
        self._dropped.close()
        self._shards.close()

    @property
    def rows(self) -> dict[str, int]:
        """Return the number of rows so far, by split."""
        return self._shards.rows

    def add(self, written: WrittenUnit) -> None:
        """Add the next unit and delete its file."""
        writer = self._shards.writers[written.unit.split]
        writer.append(written.out, written.rows, written.text_bytes)
        written.out.unlink()
        self._dropped.writelines(written.dropped)
        self.tally.add(written.tally)
        self.dropped.update(written.dropped_by_rule)
        for name, counts in written.counts.items():
            before = self.counts.get(name, {})
            self.counts[name] = self._steps[name].add_counts(before, counts)
        self.units += 1
        self._unnoted += written.text_bytes
        if self._unnoted > _NOTE_BYTES or time.monotonic() > self._noted_at + _NOTE_SECONDS:
            self._note_progress()

    def finish(self) -> list[dict[str, Any]]:
        """Rename and verify the shards, and return the manifest entries of all files."""
        files = self._shards.finish()
        self._dropped.close()
        return [*files, manifest.file_entry(self._directory, self._directory / DROPPED)]

    def summarize_splits(self) -> dict[str, Any]:
        """Return the rows, bytes of text and shards of each split, for the manifest."""
        return self._shards.summarize()

    def _note_progress(self) -> None:
        self._dropped.flush()
        self._flusher.sync(self._dropped)
        states = self._shards.state()
        sizes = {DROPPED: self._dropped.tell()} | self._shards.list_sizes(states)
        progress = {
            "version": _VERSION,
            "units": self.units,
            "tally": self.tally.to_json(),
            "dropped": self.dropped,
            "counts": self.counts,
            "shards": states,
            "files": sizes,
        }
        record = hashing.seal_record(progress)  # a copy, because the tally changes later
        self._flusher.then(lambda: manifest.write_json(self._directory / _PROGRESS, record))
        self._unnoted = 0
        self._noted_at = time.monotonic()
