"""Decide which rows to keep between the two passes of a build.

The first pass has written a part and sidecars for each work unit. This module numbers the rows of
all units in order (rows of earlier datasets come first), collects their sidecars in arrays on disk
(rows.py: places, scores, digests, keys), and then takes those of these steps that the options need:

1. drops the rows with the lowest scores (classify/top_scores.py);
2. drops rows whose content equals that of an earlier row;
3. sorts the keys of each band, to find the rows that share one (key_groups.py);
4. computes the sets of shingles of these rows (shingle_sets.py);
5. walks the rows in order and finds the leader of each near duplicate (leaders.py).

The result is a plan on disk, which the second pass follows (plan.py). A step that was finished
before a kill is not repeated.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import hashing, log, manifest, records, units, workers
from lib.core.errors import ArtifactError
from lib.core.progress import Progress
from lib.corpus import pool, work_units
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import RowOptions
from lib.corpus.work_units import UnitResult
from lib.curate.classify import top_scores
from lib.curate.disk_array import DiskArray
from lib.curate.near import key_groups, shingle_sets
from lib.curate.near import plan as near_plan
from lib.curate.near.leaders import Limits, SetStore, Walk
from lib.curate.near.minhash import Bands
from lib.curate.near.recall import RecallSample
from lib.curate.near.rows import Collector, RowRange
from lib.curate.near.shingle_sets import SetsTask
from lib.curate.near.signatures import EarlierDataset, are_masked

if TYPE_CHECKING:
    import numpy as np

_VERSION = 2  # version of the files in the working directory; files of another version are deleted
_DOCUMENTS_AT_ONCE = 1 << 13  # documents with a shared key in one step of the walk


class Planner:
    """Makes the plan of a build in two passes.

    directory: working directory, deleted after the second pass. files: the input files in order.

    >>> planner = Planner(directory, row_options, files, workers)
    >>> if not planner.is_collected: …             # the first pass
    >>> plan = planner.make_plan(results)
    """

    def __init__(
        self, directory: Path, row_options: RowOptions, files: Sequence[InputFile], count: int
    ) -> None:
        self._state = _read_state(directory / near_plan.STATE)
        if self._state.get("version") != _VERSION:
            self._state = {"version": _VERSION}
            for path in directory.iterdir() if directory.is_dir() else ():
                if path.is_file():
                    path.unlink()
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._row_options = row_options
        self._files = files
        self._workers = count
        self._earlier = [
            EarlierDataset(path, self.is_collected) for path in row_options.near_against
        ]

    @property
    def is_collected(self) -> bool:
        """Return whether the parts of all units were read, so no file of the input is needed."""
        return "rows" in self._state

    @property
    def is_planned(self) -> bool:
        """Return whether the plan is complete."""
        return "walk" in self._state or ("top" in self._state and not self._row_options.drops_near)

    def make_plan(self, results: Iterable[UnitResult], progress: bool) -> near_plan.RowPlan:
        """Return the plan.

        results: the results of all units in order; not read if the plan is complete.
        """
        if not self.is_planned:
            collector = Collector(
                self._directory, self._row_options, self._files, not self.is_collected
            )
            with collector:
                for earlier in self._earlier:
                    collector.add_dataset(earlier)
                first_new = collector.rows
                for result in results:
                    collector.add(result)
            if not self.is_collected:
                self._note(
                    rows=collector.rows, first_new=first_new, not_compared=collector.not_compared
                )
            # After a kill, the arrays may contain a part of the interrupted walk.
            near_plan.create_arrays(self._directory, self._state["rows"])
            if self._row_options.keep_top is not None:
                self._drop_low_scores(self._row_options.keep_top)
            if self._row_options.drops_near:
                self._find_copies()
                self._group()
                self._compute_sets(collector.ranges, progress)
                self._walk(progress)
        return near_plan.RowPlan(
            self._directory, self._state, self._row_options, self._files, self._earlier
        )

    def _note(self, **facts: Any) -> None:
        os.sync()  # the files of a step must be on disk before the record says that it is finished
        self._state |= facts
        record = hashing.seal_record(self._state)
        manifest.write_json(self._directory / near_plan.STATE, record)

    def _array(self, name: str, dtype: Any, width: int = 0) -> DiskArray:
        return DiskArray(self._directory / name, dtype, width=width)

    def _drop_low_scores(self, share: float) -> None:
        """Keep the share of rows with the highest scores; among equal scores, the first rows."""
        import numpy as np

        first_new = self._state["first_new"]
        rows = self._state["rows"] - first_new
        count = top_scores.count_kept(rows, share)
        path = self._directory / near_plan.SCORES
        threshold = top_scores.find_threshold(path, first_new, count)
        selector = top_scores.Selector(threshold)
        rules = self._array(near_plan.RULES, np.uint8)
        counts = np.zeros(top_scores.BINS, np.int64)
        for first, scores in self._array(near_plan.SCORES, np.float32).blocks():
            new = scores[max(0, first_new - first) :]
            counts += top_scores.count_bins(new)
            start = first + len(scores) - len(new)
            rules.values[start : start + len(new)][~selector.select(new)] = near_plan.LOW
            rules.release()
        bins = counts.tolist()
        self._note(top={"rows": rows, "kept": count, "score": threshold.score, "bins": bins})
        log.info(
            f"quality: {units.counted(rows - count, 'row')} of {rows:,} are below the score "
            f"{threshold.score:.6g} of --keep-top {share:g}"
        )

    def _find_copies(self) -> None:
        """Drop rows whose content equals the content of an earlier row."""
        import numpy as np

        first_new = self._state["first_new"]
        path = self._directory / "copies"
        is_omitted = self._array(near_plan.RULES, np.uint8)
        count = key_groups.write_groups(
            self._array("digests", np.uint64, 2), is_omitted, first_new, path
        )
        firsts = DiskArray(self._directory / "firsts", np.int64, (count,))
        leaders = self._array(near_plan.LEADERS, np.int64)
        rules = self._array(near_plan.RULES, np.uint8)
        copies = 0
        for _, pairs in DiskArray(path, np.uint64, width=2).blocks():
            documents = pairs[:, 0].astype(np.int64)
            groups = pairs[:, 1].astype(np.int64)
            opened, index = np.unique(groups, return_index=True)
            is_new = firsts.values[opened] == 0
            firsts.values[opened[is_new]] = documents[index[is_new]] + 1
            first = firsts.values[groups]
            is_copy = (first != documents + 1) & (documents >= first_new)
            leaders.values[documents[is_copy]] = first[is_copy]
            rules.values[documents[is_copy]] = near_plan.COPY
            copies += int(is_copy.sum())
        self._delete("copies", "firsts")
        log.info(f"near duplicates: {units.counted(copies, 'row')} equal earlier rows")

    def _group(self) -> None:
        """Write to a file for each band which rows share a key."""
        if "pairs" in self._state:
            return
        bands = self._row_options.near_bands
        tasks = [(self._directory, band, self._state["first_new"]) for band in range(bands)]
        with workers.Pool(
            min(self._workers, bands), "bands", _prepare_grouping, context=pool.start_server()
        ) as processes:
            pairs = list(processes.run(tasks))
        self._note(pairs=pairs)

    def _members(self) -> list[DiskArray]:
        import numpy as np

        return [
            self._array(f"members.{band}", np.uint64, 2)
            for band in range(self._row_options.near_bands)
        ]

    def _compute_sets(self, ranges: Sequence[RowRange], progress: bool) -> None:
        """Compute the sets of the rows that share a key, in the order of the rows."""
        import numpy as np

        if "sets" in self._state:
            return
        total = 0
        computed = 0
        outputs: deque[Path] = deque()
        with (
            workers.Pool(
                max(1, min(self._workers, len(ranges))),
                "sets",
                shingle_sets.prepare_worker,
                context=pool.start_server(),
            ) as processes,
            (self._directory / "candidates").open("wb") as candidates,
            (self._directory / "ends").open("wb") as ends,
            (self._directory / "sets").open("wb") as sets,
            Progress("compare", None, "part", progress) as bar,
        ):
            for sizes in processes.run(self._list_tasks(ranges, candidates, outputs)):
                path = outputs.popleft()
                if sizes is None:
                    raise self._describe_damage(ranges[int(path.suffix[1:])].path)
                ends.write((np.cumsum(sizes) + total).tobytes())
                total += int(sizes.sum())
                computed += len(sizes)
                with path.open("rb") as part:
                    shutil.copyfileobj(part, sets, 1 << 20)
                path.unlink()
                bar.advance()
        log.info(
            f"near duplicates: {units.counted(computed, 'row')} may be similar to another row "
            f"({units.size(8 * total)} of n-grams on disk)"
        )
        self._note(sets=total)

    def _describe_damage(self, part: Path) -> ArtifactError:
        is_own = part.is_relative_to(self._directory)  # otherwise it is merged
        return work_units.describe_damage(part, self._directory if is_own else None)

    def _list_tasks(
        self, ranges: Sequence[RowRange], candidates: BinaryIO, outputs: deque[Path]
    ) -> Iterator[SetsTask]:
        """Yield the tasks for the rows that share a key.

        candidates: file for the numbers of these rows. outputs: receives the file of each task.
        """
        members = self._members()
        masks = are_masked(self._row_options)
        for number, row_range in enumerate(ranges):
            documents = _list_documents(members, row_range.first, row_range.first + row_range.rows)
            if len(documents):
                candidates.write(documents.tobytes())
                outputs.append(self._directory / f"sets.{number}")
                yield SetsTask(
                    str(row_range.path),
                    row_range.digest,
                    row_range.is_shard,
                    row_range.row_numbers(documents),
                    str(outputs[-1]),
                    self._row_options,
                    masks and not row_range.is_shard,
                )

    def _walk(self, progress: bool) -> None:
        """Find the leader of each near duplicate, and the size of each cluster."""
        import numpy as np

        options = self._row_options
        pairs = sum(self._state["pairs"])
        remembered = DiskArray(self._directory / "remembered", np.int64, (pairs,))
        counts = DiskArray(self._directory / "counts", np.int32, (pairs,))
        candidates = self._array("candidates", np.int64)
        plan = near_plan.PlanArrays(self._directory)
        limits = Limits(
            options.near_threshold,
            options.near_candidates,
            options.near_members,
            self._state["first_new"],
        )
        with (
            (self._directory / "sets").open("rb") as file,
            Progress("near", len(candidates), "row", progress) as bar,
        ):
            store = SetStore(
                file, self._array("candidates", np.int64), self._array("ends", np.int64)
            )
            bands = Bands(options.near_bands, options.near_band_size)
            sample = RecallSample(bands, len(candidates), options.near_threshold)
            walk = Walk(self._members(), remembered, counts, store, limits, sample)
            for first in range(0, len(candidates), _DOCUMENTS_AT_ONCE):
                documents = candidates.values[first : first + _DOCUMENTS_AT_ONCE].copy()
                for document, groups in walk.list_steps(int(documents[0]), int(documents[-1]) + 1):
                    if leader := walk.find_leader(document, groups):
                        plan.drop(document, *leader)
                bar.advance(len(documents))
                walk.release()
                plan.release()
        largest = plan.finish()
        self._note(walk=asdict(walk.counts), largest=largest, recall=sample.counts)
        self._delete("remembered", "counts", "sets", "ends", "candidates")
        self._delete(*(f"members.{band}" for band in range(options.near_bands)))

    def _delete(self, *names: str) -> None:
        for name in names:
            (self._directory / name).unlink()


def _read_state(path: Path) -> dict[str, Any]:
    """Return the facts that finished steps have recorded, {} if they are missing or damaged."""
    try:
        return hashing.open_record(records.read_mapping(path))
    except ValueError:
        return {}


def _prepare_grouping() -> Any:
    return _group_band


def _group_band(task: tuple[Path, int, int]) -> int:
    """Write which rows share a key of one band; returns the number of pairs."""
    import numpy as np

    directory, band, first_new = task
    return key_groups.write_groups(
        DiskArray(directory / f"keys.{band}", np.uint64),
        DiskArray(directory / near_plan.RULES, np.uint8),
        first_new,
        directory / f"members.{band}",
    )


def _list_documents(members: Sequence[DiskArray], first: int, last: int) -> np.ndarray:
    """Return the documents in [first, last) that share a key of some band (int64, increasing)."""
    import numpy as np

    pieces = []
    for band in members:
        documents = band.values[:, 0]
        begin, end = np.searchsorted(documents, np.array([first, last], np.uint64))
        pieces.append(documents[begin:end].astype(np.int64))
        band.release()
    return np.unique(np.concatenate(pieces))
