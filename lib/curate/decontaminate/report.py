"""Report which test questions occur in a dataset: decontamination.json, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lib.core import manifest, units
from lib.curate.decontaminate import index
from lib.curate.decontaminate.hits import SetHits, TestHits
from lib.curate.decontaminate.index import Frequent, TestSet
from lib.curate.step import Section

FILE = "decontamination.json"
MOST_HIT = 0.02  # a set with a larger share of its questions in the dataset is a problem
_LISTED = 10  # unprotected questions that the report lists, for each set and reason
_SHOWN = 10  # test sets in the printed summary
_MOST_ROWS = 300  # test sets on the page of the dataset
_DIGITS = 4


class SetReport(NamedTuple):
    """Joins a test set with its hits."""

    test_set: TestSet
    hits: SetHits

    @property
    def share(self) -> float:
        """Return the share of the compared questions that occur in the dataset."""
        return len(self.hits.questions) / max(1, self.test_set.protected)

    def describe(self, drops: bool) -> dict[str, Any]:
        """Return the entry of the report. drops: whether documents with questions are dropped."""
        unprotected = self.test_set.unprotected
        questions = self.hits.questions
        return {
            "name": self.test_set.name,
            "digest": self.test_set.digest,
            "questions": self.test_set.questions,
            "unprotected": {
                reason: {"count": len(numbers), "first": numbers[:_LISTED]}
                for reason, numbers in unprotected.items()
            },
            "frequent": [
                {"question": number, "sampled_documents": rows}
                for number, rows in self.test_set.frequent
            ],
            "hit": len(questions),
            "share": round(self.share, _DIGITS),
            "documents": self.hits.documents,
            "dropped": self.hits.documents if drops else 0,
            "documents_by_question": {str(n): questions[n] for n in sorted(questions)},
            "samples": [sample._asdict() for sample in self.hits.samples],
        }


class TestSetReport:
    """Reports the hits of all test sets.

    least, report_only: the options --decontaminate-share and --decontaminate-report-only.
    """

    __test__ = False  # pytest collects classes with this name otherwise

    def __init__(
        self, test_sets: list[TestSet], frequent: Frequent, least: float, report_only: bool
    ) -> None:
        self._test_sets = test_sets
        self._frequent = frequent
        self._least = least
        self._report_only = report_only

    def list_sets(self, hits: TestHits) -> list[SetReport]:
        """Return the test sets: the largest share of hits first, then the names."""
        reports = [
            SetReport(test_set, hits.sets.get(test_set.name, SetHits()))
            for test_set in self._test_sets
        ]
        return sorted(reports, key=lambda report: (-report.share, report.test_set.name))

    def summarize(self, hits: TestHits) -> dict[str, Any]:
        """Return the totals of all sets."""
        reports = self.list_sets(hits)
        return {
            "sets": len(reports),
            "sets_hit": sum(bool(report.hits.documents) for report in reports),
            "sets_above_limit": [
                report.test_set.name for report in reports if report.share > MOST_HIT
            ],
            "questions": sum(report.test_set.questions for report in reports),
            "unprotected": sum(
                report.test_set.questions - report.test_set.protected for report in reports
            ),
            "questions_hit": sum(len(report.hits.questions) for report in reports),
            "compared": hits.compared,
            "documents": hits.documents,
            "beginnings": hits.beginnings,
        }

    def write(self, directory: Path, hits: TestHits) -> Path:
        """Write decontamination.json into a directory, and return its path."""
        path = directory / FILE
        content = {
            "parameters": {
                "words_of_an_n_gram": index.WORDS,
                "least_share": self._least,
                "report_only": self._report_only,
                "shortest_question": index.SHORTEST,
                "most_questions_with_an_n_gram": index.MOST_QUESTIONS,
                "limit": MOST_HIT,
            },
            "frequent": self._frequent._asdict(),
            **self.summarize(hits),
            "test_sets": [
                report.describe(not self._report_only) for report in self.list_sets(hits)
            ],
        }
        manifest.write_json(path, content)
        return path

    def make_section(self, hits: TestHits) -> Section:
        """Return the table for the report about the dataset."""
        reports = self.list_sets(hits)
        rows = []
        for report in reports[:_MOST_ROWS]:
            sample = report.hits.samples[0] if report.hits.samples else None
            rows.append(
                [
                    report.test_set.name,
                    f"{report.test_set.questions:,}",
                    f"{report.test_set.questions - report.test_set.protected:,}",
                    f"{len(report.hits.questions):,}",
                    f"{100 * report.share:.1f} %",
                    f"{report.hits.documents:,}",
                    f"question {sample.question}: {sample.n_gram}" if sample else "",
                ]
            )
        was_dropped = (
            "No document was dropped for them"
            if self._report_only
            else "This rule dropped the documents that no earlier rule had dropped"
        )
        note = (
            f"Test questions that occur in documents. {was_dropped}. The share is that of the "
            f"questions that could be compared. {FILE} lists all test sets and questions."
        )
        head = ["test set", "questions", "not compared", "found", "share", "documents", "sample"]
        problems = [
            f"{report.test_set.name}: {100 * report.share:.1f} % of its compared questions "
            "occur in documents."
            for report in reports
            if report.share > MOST_HIT
        ]
        problems += [
            self._describe_frequent(report.test_set)
            for report in reports
            if report.test_set.frequent
        ]
        return Section("Test sets", note, head, rows, problems)

    def _describe_frequent(self, test_set: TestSet) -> str:
        """Return the problem that questions of a set occur often, but are ignored as frequent."""
        most_first = sorted(test_set.frequent, key=lambda pair: -pair[1])
        listed = [f"question {number} in {rows:,}" for number, rows in most_first]
        return (
            f"{test_set.name}: most n-grams of {units.counted(len(listed), 'question')} are "
            "ignored as frequent, so documents that contain them may have stayed. Of "
            f"{self._frequent.rows:,} sampled documents: {units.join_names(listed, _LISTED)}."
        )

    def format_lines(self, hits: TestHits) -> dict[str, str]:
        """Return the lines of the printed summary by label: totals, then the sets with hits."""
        reports = self.list_sets(hits)
        summary = self.summarize(hits)
        hit_sets = [report for report in reports if report.hits.documents]
        remark = ", none dropped for them" if self._report_only else ""
        lines = {
            "test sets": f"{units.counted(hits.documents, 'document')} with questions of "
            f"{summary['sets_hit']} of {units.counted(len(reports), 'set')}{remark}; "
            f"{summary['unprotected']:,} of {units.counted(summary['questions'], 'question')} "
            f"could not be compared; {FILE} lists all"
        }
        for report in hit_sets[:_SHOWN]:
            mark = f"; over {100 * MOST_HIT:g} % is a problem" if report.share > MOST_HIT else ""
            documents = units.counted(report.hits.documents, "document")
            lines[f"  {report.test_set.name}"] = (
                f"{len(report.hits.questions):,} of {report.test_set.protected:,} compared "
                f"questions ({100 * report.share:.1f} %{mark}) in {documents}"
            )
        if len(hit_sets) > _SHOWN:
            lines["  more"] = f"{units.counted(len(hit_sets) - _SHOWN, 'further set')} with hits"
        if clean := [report.test_set.name for report in reports if not report.hits.documents]:
            lines["  clean"] = units.join_names(clean, _SHOWN)
        if frequent := sum(len(report.test_set.frequent) for report in reports):
            lines["  frequent"] = (
                f"{units.counted(frequent, 'question')} in documents that were not dropped, since "
                "most of the n-grams are frequent; the report names them"
            )
        if hits.beginnings:
            lines["  beginnings"] = (
                f"only the beginning of {units.counted(hits.beginnings, 'large document')} was "
                "compared"
            )
        return lines
