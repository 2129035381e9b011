"""Define a step of a curation. To add one, write a subclass of CurationStep; name it in table.py.

A curation reads its input twice. In the first pass, worker processes call `start` of each step, and
what it returns, with every row. Between the passes, `decide` of each step that needs the whole
dataset drops further rows. In the second pass, the rows that are left are written; what
`start_rewriting` returns may change them.

Every step sees every row, also a row that an earlier step drops, so that the report can show how
many rows each rule would drop alone. Neither the number of workers nor the division of the input
into units changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from lib.curate.rows import RowBatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    import pyarrow as pa

    from lib.curate.reader import SourceDataset
    from lib.curate.whole import WholeDataset

Counts = dict[str, Any]  # values for JSON
_NOTHING: Mapping[str, Any] = {}


class RuleVerdict(NamedTuple):
    """Contains which rows of a batch a rule drops (bool [rows]), and why.

    rule: its name in dropped.jsonl and in the report. values: the measurement of each row, or
    empty.
    """

    rule: str
    dropped: np.ndarray
    values: Sequence[float | str | None] = ()


class StepResult(NamedTuple):
    """Contains what a step finds out about a batch.

    columns: values of new columns of the dataset, one per row. sidecars: by name, an array
    [rows, …] that `decide` reads.
    """

    verdicts: Sequence[RuleVerdict] = ()
    columns: Mapping[str, Sequence[Any]] = _NOTHING
    sidecars: Mapping[str, np.ndarray] = _NOTHING


class RunningStep(Protocol):
    """Looks at rows in the first pass."""

    def run(self, batch: RowBatch) -> StepResult:
        """Return what the step finds out about a batch."""
        ...

    def count(self) -> Counts:
        """Return the step's own counts. Called once, after the last row of a unit."""
        ...


class Rewriting(Protocol):
    """Changes rows in the second pass."""

    def rewrite(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Counts]:
        """Return the changed rows, as many as before, and the step's own counts."""
        ...

    def show(self, text: str) -> str:
        """Return a text as the report may show it."""
        ...


class Section(NamedTuple):
    """Contains a table of a step for the report, and the problems that the report begins with."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    problems: Sequence[str] = ()


class CurationStep:
    """A filter, a label, a choice among all rows, or a mask.

    A step is made from the options that its class declares, and pickled for the worker processes.

    name: in the records of a curation. options: the dataclass that declares the options.
    """

    name: ClassVar[str]
    options: ClassVar[type]

    @classmethod
    def from_options(cls, chosen: Any) -> CurationStep | None:
        """Return the step, None if the options leave it out.

        chosen: an object of the class `options`. Raises UsageError or ArtifactError if options
        contradict each other, or if a file that they name is missing or damaged.
        """
        raise NotImplementedError

    def require_source(self, source: SourceDataset) -> None:
        """Raise UsageError if the step cannot work on this dataset."""

    def require_command(self, save_dir: Path, changing: Sequence[CurationStep]) -> None:
        """Raise UsageError if the step contradicts --save-dir or the steps that change rows."""

    def estimate_disk(self, source: SourceDataset) -> int:
        """Return the bytes that files of the step take while the dataset is written."""
        return 0

    def identify(self) -> dict[str, Any]:
        """Return what the result depends on: values of options, and digests of files they name."""
        raise NotImplementedError

    def identify_first_pass(self) -> dict[str, Any]:
        """Return the part of `identify` that the first pass depends on.

        It must be the same for --part and --merge. The rest may be changed for --merge.
        """
        return self.identify()

    def list_versions(self) -> dict[str, Any]:
        """Return the versions of code and packages that the result depends on, by their names."""
        return {}

    def describe(self) -> dict[str, str]:
        """Return lines of the plan by label."""
        return {}

    def list_rules(self) -> dict[str, str]:
        """Return the rules by which the step drops rows, in order, with their options as typed."""
        return {}

    def list_decisions(self) -> list[str]:
        """Return those of the rules that `decide` applies, and not the first pass."""
        return []

    def list_inputs(self) -> list[str]:
        """Return the columns of the input that the step reads from a batch, where they exist."""
        return []

    def list_columns(self) -> dict[str, str]:
        """Return the columns that the step adds: for each the kind `string`, `int` or `float`."""
        return {}

    def prepare(self, source: SourceDataset, work: Path, progress: bool) -> None:
        """Prepare the step before the first row is read, again after a kill, and for --merge.

        The result depends on all rows of `source`, also if this process reads only a part of them.
        work: the step's own directory, which every worker process can read; after a kill it
        contains what the killed process wrote.
        """

    def start(self) -> RunningStep | None:
        """Return what looks at rows in a worker process, None if the first pass needs nothing."""
        return None

    def decide(self, dataset: WholeDataset) -> Counts:
        """Drop rows that only the whole dataset shows; return the step's own counts."""
        return {}

    def list_late_columns(self) -> dict[str, str]:
        """Return the columns whose values `decide` writes, as files of that name (int64 [rows])."""
        return {}

    def describe_earlier(self, number: int) -> dict[str, Any]:
        """Return the place of a row of another dataset. number: as in `leaders`, from 1."""
        raise NotImplementedError

    def list_excerpts(self, dataset: WholeDataset) -> list[int]:
        """Return the rows whose beginning the report shows, by their number in the curation."""
        return []

    def start_rewriting(self) -> Rewriting | None:
        """Return what changes rows in the second pass, None if they stay as they are."""
        return None

    def add_counts(self, total: Counts, more: Counts) -> Counts:
        """Return the step's own counts of several units; the units are added in their order.

        total: {} before the first unit.
        """
        return total or more

    def write_files(self, directory: Path, dataset: WholeDataset, counts: Counts) -> list[Path]:
        """Write the step's own files into a dataset that is finished otherwise; return them.

        counts: the step's own counts of all units.
        """
        return []

    def summarize(self, counts: Counts) -> dict[str, Any]:
        """Return the step's totals for the manifest, under a name of their own.

        counts: the step's own counts of all units.
        """
        return {}

    def list_sections(self, counts: Counts) -> Iterator[Section]:
        """Yield the step's part of the report. counts: the step's own counts of all units."""
        yield from ()

    def format_lines(self, counts: Counts) -> dict[str, str]:
        """Return the step's lines of the printed summary by label."""
        return {}


def list_rules(steps: Sequence[CurationStep]) -> dict[str, str]:
    """Return the rules of all steps in their order: for each the option, as typed."""
    return {rule: option for step in steps for rule, option in step.list_rules().items()}
