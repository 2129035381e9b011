"""Puts what the units gave together, in order: a dataset directory with its errors.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.core import manifest
from lib.corpus.documents import SKIPPED_FILE, Shape, Tally, problem_line
from lib.corpus.scan import Entry
from lib.corpus.shards import ShardWriter
from lib.corpus.work import Done

ERRORS = "errors.jsonl"


class Dataset:
    """A dataset in the making: one split lies in the directory itself, two in one each.

    >>> with Dataset(directory, shape) as dataset:
    ...     for done in pool.run(units):
    ...         dataset.add(done)
    ...     files = dataset.finish()
    """

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.tally = Tally()
        self._directory = directory
        self._homes = {split: directory / split if len(shape.splits) > 1 else directory
                       for split in shape.splits}
        self._writers = {split: ShardWriter(home, split, shape.keep_source)
                         for split, home in self._homes.items()}
        self._errors = (directory / ERRORS).open("wb")
        self._lines_before = 0

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._errors.close()
        for writer in self._writers.values():
            writer.close()

    @property
    def errors(self) -> Path:
        """Return the path of errors.jsonl, all lines so far in it."""
        if not self._errors.closed:
            self._errors.flush()
        return self._directory / ERRORS

    @property
    def rows(self) -> dict[str, int]:
        """Return the rows of each split so far."""
        return {split: writer.rows for split, writer in self._writers.items()}

    def note_skipped(self, entries: Iterable[Entry]) -> None:
        """List what the scan of a plain directory left out."""
        for entry in entries:
            self._errors.write(problem_line(entry.path, None, None, entry.skipped,
                                            "left out by the scan of the directory", SKIPPED_FILE))
            self.tally.problems[entry.skipped] += 1

    def add(self, done: Done) -> None:
        """Add what the next unit gave; units must come in their order."""
        self._add_errors(done)
        for split, writer in self._writers.items():
            writer.append(done.unit.part(split), done.rows[split], done.text_bytes[split])
        self.tally.add(done.tally)

    def finish(self) -> list[dict[str, Any]]:
        """Name and verify the shards and return the manifest entries of all files."""
        files = []
        for split, home in self._homes.items():
            prefix = home.relative_to(self._directory)
            files += [entry | {"path": (prefix / entry["path"]).as_posix()}
                      for entry in self._writers[split].finish()]
        if len(self._homes) > 1:
            path = self._directory / "dataset_dict.json"
            manifest.write_json(path, {"splits": list(self._homes)})
            files.append(manifest.file_entry(self._directory, path))
        self._errors.close()
        return [*files, manifest.file_entry(self._directory, self.errors)]

    def summary(self) -> dict[str, Any]:
        """Return what the manifest says about the content."""
        tally = self.tally
        splits = {split: writer.summary() for split, writer in self._writers.items()}
        return {"rows": sum(split["rows"] for split in splits.values()),
                "text_bytes": sum(split["text_bytes"] for split in splits.values()),
                "splits": splits, "documents": tally.documents, "short": tally.short,
                "replaced": tally.replaced, "failed_files": len(tally.failed),
                "problems": dict(sorted(tally.problems.items()))}

    def _add_errors(self, done: Done) -> None:
        """Append the lines of errors.jsonl, numbering those of a cut file through."""
        piece = done.unit.pieces[0]
        if piece.start == 0:
            self._lines_before = 0
        part = done.unit.part("errors")
        with part.open("rb") as lines:
            for text in lines:
                if self._lines_before:
                    problem = json.loads(text)
                    if problem["line"] is not None:
                        problem["line"] += self._lines_before
                    text = json.dumps(problem).encode() + b"\n"
                self._errors.write(text)
        part.unlink()
        self._lines_before += 0 if piece.is_whole else done.lines
