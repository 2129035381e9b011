"""Store a plan: how often the second pass writes each row, and why it drops the others."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.core import units
from lib.core.errors import Problems
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import UPSAMPLE, RowOptions
from lib.curate.disk_array import DiskArray
from lib.curate.near import key_groups, minhash, recall
from lib.curate.near.minhash import Bands
from lib.curate.near.signatures import EarlierDataset, list_paths

if TYPE_CHECKING:
    import numpy as np

STATE = "state.json"  # the finished steps; without it, the work starts anew
LEADERS = "leaders"  # int64: 1 + the number of the kept row that a row duplicates, 0: it is kept
RULES = "rules"  # uint8
SIMILARITIES = "similarities"  # float32
SIZES = "sizes"  # uint32: number of rows that were dropped as duplicates of this one
SCORES = "scores"  # float32, from --quality-model
KEPT, COPY, NEAR, LOW = range(4)  # values of RULES
# Names of the rules in the tables of selection.py, in the order of application.
RULE_NAMES = {LOW: "low_scores", COPY: "duplicates", NEAR: "near_duplicates"}
# Smallest size of a cluster → how many times its kept row is written, as in FineWeb-2.
_COPIES = {1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1}
_LARGEST = 10  # clusters that the manifest lists
_OTHER_FILES = 200  # open files besides those of the bands: shards, sidecars, pipes of workers


def create_arrays(directory: Path, rows: int) -> None:
    """Create the arrays of a plan that keeps all rows."""
    import numpy as np

    kinds = {LEADERS: np.int64, RULES: np.uint8, SIMILARITIES: np.float32, SIZES: np.uint32}
    for name, kind in kinds.items():
        DiskArray(directory / name, kind, (rows,))


class PlanArrays:
    """Fills the arrays of a plan."""

    def __init__(self, directory: Path) -> None:
        import numpy as np

        self._leaders = DiskArray(directory / LEADERS, np.int64)
        self._rules = DiskArray(directory / RULES, np.uint8)
        self._similarities = DiskArray(directory / SIMILARITIES, np.float32)
        self._sizes = DiskArray(directory / SIZES, np.uint32)
        self._arrays = (self._leaders, self._rules, self._similarities, self._sizes)

    def release(self) -> None:
        """Remove the arrays from memory."""
        for array in self._arrays:
            array.release()

    def drop(self, document: int, leader: int, similarity: float) -> None:
        """Drop a row as a near duplicate of another one."""
        self._leaders.values[document] = leader + 1
        self._rules.values[document] = NEAR
        self._similarities.values[document] = similarity

    def finish(self) -> list[list[int]]:
        """Count the rows of each cluster; return the largest as `[size, row]`.

        An exact copy of a dropped row gets the leader and the similarity of that row.
        """
        import numpy as np

        for first, leaders in self._leaders.blocks():
            dropped = np.flatnonzero(leaders)
            direct = leaders[dropped] - 1
            last = self._leaders.values[direct]
            is_moved = last != 0
            moved = dropped[is_moved] + first
            self._leaders.values[moved] = last[is_moved]
            self._similarities.values[moved] = self._similarities.values[direct[is_moved]]
            self._rules.values[moved] = NEAR
            final, counts = np.unique(np.where(is_moved, last - 1, direct), return_counts=True)
            self._sizes.values[final] += counts.astype(np.uint32)
            self.release()
        largest: list[tuple[int, int]] = []
        for first, sizes in self._sizes.blocks():
            order = np.argsort(-sizes.astype(np.int64), kind="stable")[:_LARGEST]
            largest += [(int(sizes[i]) + 1, int(i) + first) for i in order if sizes[i]]
            largest = sorted(largest, key=lambda cluster: (-cluster[0], cluster[1]))[:_LARGEST]
        return [[size, row] for size, row in largest]


class PlannedRows(NamedTuple):
    """Contains the plan of some rows, one entry per row in each array.

    copies: how many times the row is written. sizes: rows in its cluster. rules: why it is dropped,
    see RULE_NAMES. leaders: see LEADERS. similarities: to the leader. places: number of the file,
    and position in it. scores: None unless --keep-top is on.
    """

    copies: np.ndarray
    sizes: np.ndarray
    rules: np.ndarray
    leaders: np.ndarray
    similarities: np.ndarray
    places: np.ndarray
    scores: np.ndarray | None

    def list_dropped(self) -> list[tuple[str, np.ndarray]]:
        """Return which rows are dropped (bool [rows]), by the name of the decision."""
        return [(name, self.rules == rule) for rule, name in RULE_NAMES.items()]

    def find_value(self, row: int) -> float:
        """Return the measurement for a dropped row: its similarity to the leader, or its score."""
        rule = self.rules[row]
        if rule == LOW and self.scores is not None:
            return float(self.scores[row])
        return 1.0 if rule == COPY else float(self.similarities[row])


class RowPlan:
    """Reads a plan that build.py has made."""

    def __init__(
        self,
        directory: Path,
        state: Mapping[str, Any],
        row_options: RowOptions,
        files: Sequence[InputFile],
        earlier: Sequence[EarlierDataset],
    ) -> None:
        import numpy as np

        self.paths = list_paths(files)
        self._state = state
        self._row_options = row_options
        self._earlier = earlier
        self._leaders = DiskArray(directory / LEADERS, np.int64)
        self._rules = DiskArray(directory / RULES, np.uint8)
        self._similarities = DiskArray(directory / SIMILARITIES, np.float32)
        self._sizes = DiskArray(directory / SIZES, np.uint32)
        self._places = DiskArray(directory / "places", np.uint64, width=2)
        self._scores = (
            DiskArray(directory / SCORES, np.float32) if row_options.keep_top is not None else None
        )
        arrays = (self._rules, self._sizes, self._leaders, self._similarities, self._places)
        self._arrays = [*arrays, *([self._scores] if self._scores else [])]

    @property
    def first_new(self) -> int:
        """Return the number of the first row that is not in an earlier dataset."""
        return int(self._state["first_new"])

    @property
    def largest(self) -> list[tuple[int, int]]:
        """Return the size of each of the largest clusters, and the number of its kept row."""
        return [(size, row) for size, row in self._state.get("largest", [])]

    @property
    def recall(self) -> list[list[float]]:
        """Return the counts of a RecallSample; empty if an earlier version has made the plan."""
        return self._state.get("recall", [])

    def select(self, first: int, rows: int) -> PlannedRows:
        """Return the plan of consecutive rows.

        first: number of the first one among all rows of the build, without earlier datasets.
        """
        import numpy as np

        start = self._state["first_new"] + first
        rows_of_split = slice(start, start + rows)
        rules = self._rules.values[rows_of_split].copy()
        sizes = self._sizes.values[rows_of_split].astype(np.int64) + 1
        copies = np.ones(rows, np.int64)
        if self._row_options.near_keep == UPSAMPLE:
            steps = np.array([*_COPIES])
            copies = np.array([*_COPIES.values()])[np.searchsorted(steps, sizes, "right") - 1]
        copies[rules != KEPT] = 0
        planned = PlannedRows(
            copies,
            sizes,
            rules,
            leaders=self._leaders.values[rows_of_split].copy(),
            similarities=self._similarities.values[rows_of_split].copy(),
            places=self._places.values[rows_of_split].copy(),
            scores=self._scores.values[rows_of_split].copy() if self._scores else None,
        )
        for array in self._arrays:
            array.release()
        return planned

    def describe_row(self, number: int) -> dict[str, Any]:
        """Return path and position of a row. number: among all rows, including earlier datasets."""
        file, position = map(int, self._places.values[number])
        for earlier in self._earlier:
            if file < len(earlier.paths):
                path = earlier.paths[file][0]
                return {"path": path, "position": position, "dataset": earlier.name}
            file -= len(earlier.paths)
        return {"path": self.paths[file][0], "position": position}

    def list_own_places(self, places: np.ndarray) -> np.ndarray:
        """Return places in which files are numbered without the files of earlier datasets."""
        import numpy as np

        renumbered = places.copy()
        renumbered[:, 0] -= np.uint64(sum(len(earlier.paths) for earlier in self._earlier))
        return renumbered

    @property
    def summary(self) -> dict[str, Any]:
        """Return the reports of the decisions that are on, by name."""
        reports = {}
        if self._row_options.keep_top is not None:
            reports["quality"] = self._state["top"]
        if self._row_options.drops_near:
            reports["near"] = self._report_near()
        return reports

    def _report_near(self) -> dict[str, Any]:
        """Return the settings, probabilities, counts, limits and largest clusters of the search."""
        options = self._row_options
        walk = self._state["walk"]
        bands = Bands(options.near_bands, options.near_band_size)
        return {
            "probability": {
                f"{similarity:g}": round(bands.find_probability(similarity), 4)
                for similarity in minhash.CURVE
            },
            "rows": self._state["rows"] - self._state["first_new"],
            "earlier_rows": self._state["first_new"],
            "not_compared": self._state["not_compared"],
            "sharing_a_band": walk["documents"],
            "compared_pairs": walk["compared"],
            "candidates_reached": walk["candidates_reached"],
            "members_reached": walk["members_reached"],
            "recall": self._summarize_recall(bands),
            "largest": [
                {"size": size, **self.describe_row(row)} for size, row in self._state["largest"]
            ],
        }

    def _summarize_recall(self, bands: Bands) -> list[dict[str, Any]]:
        """Return the recall of the bins, and at the end of all pairs from the threshold on."""
        bins, above = recall.estimate_recall(self.recall, bands, self._row_options.near_threshold)
        return [recall_bin.summarize() for recall_bin in (*bins, *([above] if above else []))]

    def format_lines(self) -> dict[str, str]:
        """Return the lines of the printed summary by label."""
        options = self._row_options
        lines = {}
        if options.keep_top is not None:
            top = self._state["top"]
            lines["quality"] = (
                f"{top['kept']:,} of {units.counted(top['rows'], 'row')} were kept for their "
                f"scores; the lowest kept score is {top['score']:.6g}"
            )
        return lines | (self._format_near() if options.drops_near else {})

    def _format_near(self) -> dict[str, str]:
        options = self._row_options
        summary = self._report_near()
        return {
            "signatures": describe_bands(options),
            "compared": f"{units.counted(summary['compared_pairs'], 'pair')} exactly; "
            f"{units.counted(summary['sharing_a_band'], 'row')} share a band with another row, "
            f"{summary['not_compared']:,} have no words or are too long",
            "caps": f"{units.counted(summary['candidates_reached'], 'row')} had more candidates "
            f"than --near-candidates {options.near_candidates}; a band value reached "
            f"--near-members {options.near_members} "
            f"{units.counted(summary['members_reached'], 'time')}",
        }


def describe_bands(options: RowOptions) -> str:
    """Return the settings of the signatures, and the probability that a pair is compared."""
    bands = Bands(options.near_bands, options.near_band_size)
    curve = ", ".join(
        f"{100 * bands.find_probability(similarity):.1f} % at {similarity:g}"
        for similarity in minhash.CURVE
    )
    return (
        f"{bands.number} bands of {bands.size} minima, n-grams of "
        f"{units.counted(options.near_words, 'word')}; probability that a pair is compared: "
        f"{curve}"
    )


def require_bands(row_options: RowOptions) -> None:
    """Raise UsageError if any two rows would be near duplicates, or if there are too many bands.

    Each band is a file, and all of them are open at once, like the files of a large sort. So this
    raises the limit of open files of this process, if the system allows it.
    """
    if not row_options.drops_near:
        return
    problems = Problems()
    if not row_options.near_threshold:
        problems.add(
            "--near-threshold 0 drops rows that have nothing in common",
            expected="a similarity above 0, such as 0.8",
        )
    needed = row_options.near_bands + _OTHER_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, highest = (sys.maxsize if value == resource.RLIM_INFINITY else value for value in limits)
    if needed > highest:
        problems.add(
            f"--near-bands {row_options.near_bands} needs {needed:,} open files",
            expected=f"at most {highest:,}, which the system allows this process (ulimit -Hn)",
        )
    problems.raise_if_any()
    useful = min(max(needed, key_groups.MOST_BUCKETS + _OTHER_FILES), highest)
    if limit < useful:
        resource.setrlimit(resource.RLIMIT_NOFILE, (useful, limits[1]))
