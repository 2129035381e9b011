"""Drop rows that contain questions of test sets, and report which questions occur."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import options, units
from lib.core.declared import default_of, flag, list_fields, option
from lib.core.errors import Problems
from lib.curate.decontaminate import build, hits, index, matching, questions
from lib.curate.decontaminate.matching import Comparison
from lib.curate.decontaminate.report import TestSetReport
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, Section, StepResult

if TYPE_CHECKING:
    from lib.curate.reader import SourceDataset
    from lib.curate.whole import WholeDataset

RULE = "test set"
_NAMED = 5  # test sets in the plan


@dataclass(frozen=True)
class DecontaminateOptions:
    """Declares the options of the comparison with test sets."""

    decontaminate: list[Path] = option(
        [],
        group="test sets",
        parse=Path,
        metavar="DIR",
        help="drop documents that contain a question of these test sets (JSON Lines with the key "
        "question, query, prompt or text, or a suite of stage 03); in conversations, only the "
        "turns of the user are compared; may be repeated (default: no test set)",
    )
    decontaminate_share: float = option(
        0.5,
        parse=options.fraction,
        metavar="F",
        help="drop a document if it contains at least this share of the n-grams (8 words) of a "
        "question",
    )
    decontaminate_report_only: bool = option(
        False,
        help="report the test questions that occur in documents, but do not drop the documents",
    )


@dataclass
class Decontamination(CurationStep):
    """Compares rows with the questions of test sets.

    share: a row with this share of a question's n-grams contains the question. index_path: the
    directory of the index, once it is prepared.
    """

    directories: tuple[Path, ...]
    share: float
    report_only: bool
    index_path: Path = Path()

    name = "decontamination"
    options = DecontaminateOptions

    @classmethod
    def from_options(cls, chosen: DecontaminateOptions) -> Decontamination | None:
        """Return the step, None without test sets. Raises errors of the test sets."""
        if not chosen.decontaminate:
            _require_default(chosen)
            return None
        directories = (*chosen.decontaminate,)
        build.load_index(directories)
        return cls(directories, chosen.decontaminate_share, chosen.decontaminate_report_only)

    def identify(self) -> dict[str, Any]:
        """Return the digest of each test set by its name, and the other options."""
        return {
            "decontaminate": questions.identify_sets(self.directories),
            "decontaminate_share": self.share,
            "decontaminate_report_only": self.report_only,
        }

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about the test sets."""
        test_sets = build.load_index(self.directories).test_sets
        names = units.join_names([test_set.name for test_set in test_sets], _NAMED)
        total = sum(test_set.questions for test_set in test_sets)
        effect = "report" if self.report_only else "drop"
        return {
            "test sets": f"{names} ({units.counted(total, 'question')}); {effect} documents with "
            f"{100 * self.share:g} % of the n-grams of a question"
        }

    def list_rules(self) -> dict[str, str]:
        """Return the rule, unless documents are only reported."""
        names = " ".join(f"--decontaminate {path.name}" for path in self.directories)
        return {} if self.report_only else {RULE: names}

    def prepare(self, source: SourceDataset, work: Path, progress: bool) -> None:
        """Build the index of the test sets, without n-grams that are frequent in the dataset."""
        self.index_path = work / "index"
        build.prepare_index(self.directories, self.share, source, self.index_path, progress)

    def start(self) -> RunningDecontamination:
        """Return what compares batches of rows."""
        comparison = Comparison(matching.open_cached(self.index_path), self.share)
        return RunningDecontamination(comparison, self.report_only)

    def add_counts(self, total: Counts, more: Counts) -> Counts:
        """Return the hits of several units."""
        return hits.add_hits(total, more)

    def write_files(self, directory: Path, dataset: WholeDataset, counts: Counts) -> list[Path]:
        """Write decontamination.json, which lists all test sets and the questions that occur."""
        return [self._make_report().write(directory, hits.TestHits.from_json(counts))]

    def summarize(self, counts: Counts) -> dict[str, Any]:
        """Return the totals of all test sets."""
        totals = self._make_report().summarize(hits.TestHits.from_json(counts))
        return {"decontamination": totals}

    def list_sections(self, counts: Counts) -> Iterator[Section]:
        """Yield the table of the test sets."""
        yield self._make_report().make_section(hits.TestHits.from_json(counts))

    def format_lines(self, counts: Counts) -> dict[str, str]:
        """Return the lines about the test sets with hits."""
        return self._make_report().format_lines(hits.TestHits.from_json(counts))

    def _make_report(self) -> TestSetReport:
        test_sets, frequent = index.read_sets(self.index_path)
        return TestSetReport(test_sets, frequent, self.share, self.report_only)


class RunningDecontamination:
    """Compares batches of rows with test sets."""

    def __init__(self, comparison: Comparison, report_only: bool) -> None:
        self._comparison = comparison
        self._report_only = report_only

    def run(self, batch: RowBatch) -> StepResult:
        """Return which rows contain a question, with the best hit of each."""
        is_hit, values = self._comparison.compare(batch)
        return (
            StepResult() if self._report_only else StepResult([RuleVerdict(RULE, is_hit, values)])
        )

    def count(self) -> Counts:
        """Return the hits."""
        return self._comparison.hits.to_json()


def _require_default(chosen: DecontaminateOptions) -> None:
    """Raise UsageError if options are given that need a test set."""
    problems = Problems()
    for field in list_fields(DecontaminateOptions):
        if getattr(chosen, field.name) != default_of(field):
            problems.add(
                f"{flag(field.name)} needs --decontaminate DIR",
                expected=f"--decontaminate DIR, or no {flag(field.name)}",
            )
    problems.raise_if_any()
