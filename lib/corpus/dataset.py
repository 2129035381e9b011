"""Write a dataset directory and its errors.jsonl from the results of the work units, in order.

Every few seconds the writer syncs its files and records its progress in `unfinished/progress.json`.
After a kill, the next run truncates the files to the last recorded progress and continues there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import hashing, manifest, reading, records
from lib.core.errors import ArtifactError, is_of_disk
from lib.corpus import parts, selection, shards, work_units
from lib.corpus.documents import SKIPPED_FILE
from lib.corpus.dropped import DROPPED_FILE, KeptPlaces
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.scan import TreeEntry
from lib.corpus.selection import drops_rows
from lib.corpus.shards import Flusher, ShardWriter
from lib.corpus.tally import ERRORS, Tally, format_problem
from lib.corpus.unit_rows import DroppedRows, UnitRows
from lib.corpus.work_units import UnitResult
from lib.curate.decontaminate.prepared import PreparedOptions
from lib.curate.decontaminate.report import TestSetReport
from lib.curate.masks.matches import MaskedMatches, MaskTally
from lib.curate.masks.part_masker import MaskedPart
from lib.curate.near import plan as near_plan
from lib.curate.near.output import PlanOutput
from lib.curate.near.plan import PlannedRows, RowPlan

if TYPE_CHECKING:
    import numpy as np

WORK = "unfinished"
PARTS = f"{WORK}/parts"  # the output of the workers
PLAN = f"{WORK}/near"  # in a build in two passes: the output of the workers, and the plan
NOTE_BYTES = 256_000_000
NOTE_SECONDS = 10.0
_PROGRESS = f"{WORK}/progress.json"
_VERSION = 4  # the format of the progress record; after a change, a build starts anew


class DatasetWriter:
    """Writes a dataset: a single split into the directory itself, two splits into subdirectories.

    units: number of units added so far. dropped: number of dropped rows, by name of the decision.
    masks: counts of the masked matches. deletes_parts: in a build in two passes, delete the parts
    whose rows are safely written.

    >>> with DatasetWriter(directory, row_options) as dataset:
    ...     for result in pool.run(units[dataset.units:]):
    ...         dataset.add(result)
    ...     files = dataset.finish()
    """

    def __init__(
        self, directory: Path, row_options: RowOptions, deletes_parts: bool = False
    ) -> None:
        before = _restore_progress(directory)
        self.units: int = before.get("units", 0)
        self.tally = Tally.from_json(before["tally"]) if before else Tally()
        self.dropped: Counter[str] = Counter(before.get("dropped", {}))
        (directory / PARTS).mkdir(parents=True)
        self._directory = directory
        self._flusher = Flusher()
        self._homes = {
            split: directory / split if len(row_options.splits) > 1 else directory
            for split in row_options.splits
        }
        self._is_chat = row_options.format == CHAT
        schema = work_units.make_part_schema(row_options)
        self._row_options = row_options
        self.test_sets = (
            TestSetReport(row_options) if isinstance(row_options, PreparedOptions) else None
        )
        self._dropped = (directory / DROPPED_FILE).open("ab") if drops_rows(row_options) else None
        self._has_language = "language" in selection.list_columns(row_options)
        self._output = None
        if row_options.drops_near:
            schema = parts.add_cluster_size(schema)
        if row_options.has_two_passes:
            assert self._dropped
            self._output = PlanOutput(directory, row_options, before.get("planned_rows", 0))
        self._deletes_parts = deletes_parts
        self._finished: list[Path] = []  # parts to delete after the next progress record
        self._writers = {
            split: ShardWriter(
                home, split, schema, self._flusher, before.get("shards", {}).get(split, ())
            )
            for split, home in self._homes.items()
        }
        self._errors = (directory / ERRORS).open("ab")
        self._lines_before: int = before.get("lines_before", 0)
        self._rows_before: int = before.get("rows_before", 0)
        self.masks = MaskTally.from_json(before.get("masks", {}))
        self._decisions = selection.list_decisions(row_options)
        self._deciders = {
            name: decision.start(directory / WORK / name)
            for name, decision in self._decisions.items()
        }
        self._kept = {name: KeptPlaces(directory / WORK / name) for name in self._decisions}
        self._unnoted = 0
        self._noted_at = time.monotonic()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._flusher.close()
        self._errors.close()
        if self._dropped:
            self._dropped.close()
        for decider in self._deciders.values():
            decider.file.close()
        for places in self._kept.values():
            places.close()
        if self._output:
            self._output.close()
        for writer in self._writers.values():
            writer.close()

    @property
    def errors(self) -> Path:
        """Return the path of errors.jsonl after flushing it."""
        if not self._errors.closed:
            self._errors.flush()
        return self._directory / ERRORS

    @property
    def rows(self) -> dict[str, int]:
        """Return the number of rows so far, by split."""
        return {split: writer.rows for split, writer in self._writers.items()}

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

    def add(self, result: UnitResult, masked: Mapping[str, MaskedPart] | None = None) -> None:
        """Add the result of the next unit and delete its parts, unless they are kept for a merge.

        masked: by split, the part that the second pass has masked; this method deletes it. Units
        must be added in order. Raises ArtifactError if a kept part is damaged.
        """
        work_units.require_undamaged(result, self.plan_work if self._deletes_parts else None)
        if result.unit.begins:
            self._lines_before = 0
            self._rows_before = 0
        _copy_lines(result.unit.part("errors"), self._errors, "line", self._lines_before)
        dropped = result.unit.part("dropped")
        if self._dropped and dropped.exists():  # parts of an earlier version lack this file
            _copy_lines(dropped, self._dropped, "position", self._rows_before)
        for split, writer in self._writers.items():
            rows = UnitRows(result, split, self._rows_before)
            planned = self._output.select(rows) if self._output else None
            copies = self._select_rows(rows, planned)
            if self._output and planned:
                self._output.write(rows, planned, copies, writer.rows)
            later = (masked or {}).get(split)
            hits = later.hits if later else MaskedMatches(**result.masked.get(split, {}))
            self.masks.add(hits, copies, rows.list_sources())
            writer.append(
                (later and later.path) or result.unit.part(split),
                result.rows[split],
                result.text_bytes[split],
                copies,
                self._lines_before if self._is_chat else 0,
                planned.sizes if planned and self._row_options.drops_near else None,
            )
            if later and later.path:
                later.path.unlink()
            self._unnoted += result.text_bytes[split]
        if not result.digests:
            for part in result.unit.parts():
                work_units.release_part(part)
        elif self._deletes_parts:
            self._finished += [*result.unit.parts(), result.unit.part(work_units.RECORD)]
        self.tally.add(result.tally, self._lines_before, self._rows_before)
        self._lines_before += result.lines_of_part
        self._rows_before += result.rows_of_part
        self.units += 1
        if self._unnoted > NOTE_BYTES or time.monotonic() > self._noted_at + NOTE_SECONDS:
            self._note_progress()

    def finish(self) -> list[dict[str, Any]]:
        """Rename and verify the shards, and return the manifest entries of all files."""
        files = []
        for split, home in self._homes.items():
            prefix = home.relative_to(self._directory)
            files += [
                entry | {"path": (prefix / entry["path"]).as_posix()}
                for entry in self._writers[split].finish()
            ]
        if len(self._homes) > 1:
            path = self._directory / "dataset_dict.json"
            manifest.write_json(path, {"splits": list(self._homes)})
            files.append(manifest.file_entry(self._directory, path))
        self._errors.close()
        if self._dropped:
            self._dropped.close()
            files.append(manifest.file_entry(self._directory, self._directory / DROPPED_FILE))
        if self._output:
            files += self._output.finish()
            # The state goes first, so a run killed in the next line leaves no half of a plan.
            (self.plan_work / near_plan.STATE).unlink()
        if self.test_sets:
            path = self.test_sets.write(self._directory, self.tally.test_hits)
            files.append(manifest.file_entry(self._directory, path))
        shutil.rmtree(self._directory / WORK)
        return [*files, manifest.file_entry(self._directory, self.errors)]

    def summary(self) -> dict[str, Any]:
        """Return the summary for the manifest."""
        tally = self.tally
        splits = {split: writer.summary() for split, writer in self._writers.items()}
        return {
            "rows": sum(split["rows"] for split in splits.values()),
            "text_bytes": sum(split["text_bytes"] for split in splits.values()),
            "splits": splits,
            "documents": tally.documents,
            **{kind: tally.dropped[kind] for kind in selection.RULES},
            **(
                {
                    "rules": {
                        kind: {"dropped": tally.dropped[kind], "alone": tally.alone[kind]}
                        for kind in selection.list_rules(self._row_options)
                    }
                }
                if selection.list_rules(self._row_options).keys() - selection.RULES.keys()
                else {}
            ),
            **{name: self.dropped[name] for name in selection.list_counts(self._row_options)},
            **({"extracted": dict(sorted(tally.extracted.items()))} if tally.extracted else {}),
            "replaced": tally.replaced,
            "failed_files": len(tally.failed),
            "problems": dict(sorted(tally.problems.items())),
            **({"chat": tally.chat.summary(tally.problems)} if self._is_chat else {}),
            **(self._output.plan.summary if self._output else {}),
            **(
                {"decontamination": self.test_sets.summarise(tally.test_hits)}
                if self.test_sets
                else {}
            ),
            **({"masks": self.masks.summary()} if self._row_options.mask else {}),
        }

    def follow(self, plan: RowPlan) -> None:
        """Let a plan decide which rows are kept. Call this before the first `add`."""
        assert self._output
        self._output.plan = plan

    @property
    def plan_work(self) -> Path:
        """Return the directory for the work of a build in two passes, until it is finished."""
        return self._directory / PLAN

    @property
    def plan(self) -> RowPlan | None:
        """Return the plan of a build in two passes."""
        return self._output.plan if self._output else None

    @property
    def planned_rows(self) -> int:
        """Return the number of rows so far in a build in two passes, including dropped rows."""
        return self._output.rows if self._output else 0

    def _select_rows(self, rows: UnitRows, planned: PlannedRows | None) -> np.ndarray | None:
        """Return how many times each row of a part is written ([rows], None: all once).

        A decision sees only the rows that the plan and earlier decisions have kept.
        """
        import numpy as np

        if not rows.rows or not (self._deciders or planned):
            return None
        assert self._dropped
        recorder = DroppedRows(rows, self.tally, self._errors, self._has_language)
        is_kept = np.ones(rows.rows, bool)
        if self._output and planned:
            is_kept = planned.copies > 0
            self._output.add_excerpts(rows, self.tally.row_counts)
            for name, is_dropped in planned.list_dropped():
                two_pass = selection.get_decision(name)
                describe = partial(self._output.describe_dropped, planned)
                self.dropped[name] += recorder.add(two_pass, is_dropped, describe)
        for name, decision in self._decisions.items():
            sidecars = [rows.read_sidecar(sidecar) for sidecar in decision.sidecars]
            is_new = np.zeros(rows.rows, bool)
            is_new[is_kept] = self._deciders[name].add(*(values[is_kept] for values in sidecars))
            is_dropped = is_kept & ~is_new
            is_kept = is_new
            self._keep_places(name, rows, is_kept)
            if is_dropped.any():
                numbers = self._deciders[name].find_numbers(
                    *(values[is_dropped] for values in sidecars)
                )
                leaders = dict(zip(is_dropped.nonzero()[0].tolist(), numbers.tolist(), strict=True))
                describe = partial(self._describe_duplicate, name, leaders)
                self.dropped[name] += recorder.add(decision, is_dropped, describe)
        recorder.write_lines(self._dropped)
        if planned:
            return np.where(is_kept, planned.copies, 0)
        return None if is_kept.all() else is_kept

    def _keep_places(self, name: str, rows: UnitRows, is_kept: np.ndarray) -> None:
        """Remember the places of the rows that a decision keeps."""
        import numpy as np

        positions = rows.positions if len(rows.positions) else np.zeros(rows.rows, np.uint64)
        for span, start, stop in rows.list_spans():
            kept_positions = positions[start:stop][is_kept[start:stop]]
            if len(kept_positions):
                self._kept[name].append(span.file.path, kept_positions)

    def _describe_duplicate(
        self, name: str, leaders: Mapping[int, int], row: int
    ) -> tuple[float, dict[str, Any] | None]:
        return 1.0, self._kept[name].describe_row(leaders[row])

    def _note_progress(self) -> None:
        self._errors.flush()
        for file in (
            self._errors,
            *([self._dropped] if self._dropped else []),
            *(decider.file for decider in self._deciders.values()),
            *(file for places in self._kept.values() for file in places.files.values()),
            *(self._output.files() if self._output else []),
        ):
            file.flush()
            self._flusher.sync(file)
        states = {split: writer.state() for split, writer in self._writers.items()}
        sizes = {ERRORS: self._errors.tell()}
        if self._dropped:
            sizes[DROPPED_FILE] = self._dropped.tell()
        if self._output:
            sizes |= self._output.sizes
        sizes |= {f"{WORK}/{name}": decider.file.tell() for name, decider in self._deciders.items()}
        for name, places in self._kept.items():
            sizes |= {f"{WORK}/{name}.{end}": file.tell() for end, file in places.files.items()}
        for split, home in self._homes.items():
            sizes |= {
                (home / shard["name"]).relative_to(self._directory).as_posix(): shard["bytes"]
                for shard in states[split]
            }
        progress = {
            "version": _VERSION,
            "units": self.units,
            "tally": self.tally.to_json(),
            "shards": states,
            "dropped": self.dropped,
            "lines_before": self._lines_before,
            "rows_before": self._rows_before,
            "files": sizes,
            **({"planned_rows": self._output.rows} if self._output else {}),
            "masks": self.masks.to_json(),
        }
        record = hashing.seal_record(progress)  # a copy, because the tally changes later
        finished = self._finished
        self._finished = []

        def write() -> None:
            manifest.write_json(self._directory / _PROGRESS, record)
            for path in finished:
                path.unlink()

        self._flusher.then(write)
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


def _restore_progress(directory: Path) -> dict[str, Any]:
    """Truncate a directory's files to the recorded progress and return it ({}: start anew)."""
    shards.restore_names(directory)
    try:
        record = reading.with_retries(
            lambda: records.read_json(directory / _PROGRESS), directory / _PROGRESS
        )
        progress = hashing.open_record(record)
        if progress["version"] != _VERSION or any(
            records.safe_join(directory, name).stat().st_size < size
            for name, size in progress["files"].items()
        ):
            progress = {}  # another version wrote it, or a power cut lost data that it lists
    except (OSError, ValueError, KeyError, ArtifactError) as error:
        if is_of_disk(error):
            raise
        progress = {}
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    files = progress.get("files", {})
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_listed = name in files or name == _PROGRESS or name.startswith(f"{PLAN}/")
        if path.is_file() and not is_listed:
            path.unlink()
    for name, size in files.items():
        with (directory / name).open("rb+") as file:
            file.truncate(size)
    if not progress:
        (directory / _PROGRESS).unlink(missing_ok=True)
    return progress
