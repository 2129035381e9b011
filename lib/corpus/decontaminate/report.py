"""Report which test questions occur in a corpus: decontamination.json, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lib.core import manifest, units
from lib.corpus.decontaminate import index
from lib.corpus.decontaminate.hits import SetHits, TestHits
from lib.corpus.decontaminate.index import TestSet
from lib.corpus.decontaminate.prepared import PreparedOptions
from lib.corpus.page.facts import Section

FILE = "decontamination.json"
MOST_HIT = 0.02  # a set with a larger share of its questions in the corpus is a problem
_LISTED = 10  # unprotected questions that the report lists, for each set and reason
_SHOWN = 10  # test sets in the printed summary
_MOST_ROWS = 300  # test sets on the page of the dataset
_DIGITS = 4


class SetReport(NamedTuple):
    """Join a test set with its hits."""

    test_set: TestSet
    hits: SetHits

    @property
    def share(self) -> float:
        """Return the share of the compared questions that occur in the corpus."""
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
            "hit": len(questions),
            "share": round(self.share, _DIGITS),
            "documents": self.hits.documents,
            "dropped": self.hits.documents if drops else 0,
            "documents_by_question": {str(n): questions[n] for n in sorted(questions)},
            "samples": [sample._asdict() for sample in self.hits.samples],
        }


class TestSetReport:
    """Report the hits of all test sets. row_options: the options with the index of a build."""

    __test__ = False  # pytest collects classes with this name otherwise

    def __init__(self, row_options: PreparedOptions) -> None:
        self._row_options = row_options
        self._test_sets, self._frequent = index.read_sets(Path(row_options.test_index))

    def list_sets(self, hits: TestHits) -> list[SetReport]:
        """Return the test sets: the largest share of hits first, then the names."""
        found = [SetReport(each, hits.sets.get(each.name, SetHits())) for each in self._test_sets]
        return sorted(found, key=lambda each: (-each.share, each.test_set.name))

    def summarise(self, hits: TestHits) -> dict[str, Any]:
        """Return the summary for the manifest."""
        found = self.list_sets(hits)
        return {
            "sets": len(found),
            "sets_hit": sum(bool(each.hits.documents) for each in found),
            "sets_above_limit": [each.test_set.name for each in found if each.share > MOST_HIT],
            "questions": sum(each.test_set.questions for each in found),
            "unprotected": sum(each.test_set.questions - each.test_set.protected for each in found),
            "questions_hit": sum(len(each.hits.questions) for each in found),
            "compared": hits.compared,
            "documents": hits.documents,
            "beginnings": hits.beginnings,
        }

    def write(self, directory: Path, hits: TestHits) -> Path:
        """Write decontamination.json into a directory, and return its path."""
        options = self._row_options
        drops = not options.decontaminate_report_only
        path = directory / FILE
        content = {
            "parameters": {
                "words_of_an_n_gram": index.WORDS,
                "least_share": options.decontaminate_share,
                "report_only": options.decontaminate_report_only,
                "shortest_question": index.SHORTEST,
                "most_questions_with_an_n_gram": index.MOST_QUESTIONS,
                "limit": MOST_HIT,
            },
            "frequent": self._frequent._asdict(),
            **self.summarise(hits),
            "test_sets": [each.describe(drops) for each in self.list_sets(hits)],
        }
        manifest.write_json(path, content)
        return path

    def make_section(self, hits: TestHits) -> Section:
        """Return the table for the page of the dataset."""
        found = self.list_sets(hits)
        rows = []
        for each in found[:_MOST_ROWS]:
            sample = each.hits.samples[0] if each.hits.samples else None
            rows.append(
                [
                    each.test_set.name,
                    f"{each.test_set.questions:,}",
                    f"{each.test_set.questions - each.test_set.protected:,}",
                    f"{len(each.hits.questions):,}",
                    f"{100 * each.share:.1f} %",
                    f"{each.hits.documents:,}",
                    f"question {sample.question}: {sample.n_gram}" if sample else "",
                ]
            )
        was_dropped = (
            "No document was dropped for them"
            if self._row_options.decontaminate_report_only
            else "This rule dropped the documents that no earlier rule had dropped"
        )
        note = (
            f"Test questions that occur in documents. {was_dropped}. The share is that of the "
            f"questions that could be compared. {FILE} lists all test sets and questions."
        )
        head = ["test set", "questions", "not compared", "found", "share", "documents", "sample"]
        problems = [
            f"{each.test_set.name}: {100 * each.share:.1f} % of its questions occur in documents."
            for each in found
            if each.share > MOST_HIT
        ]
        return Section("Test sets", note, head, rows, problems)

    def format_lines(self, hits: TestHits, save_dir: Path) -> dict[str, str]:
        """Return the lines of the printed summary by label: totals, then the sets with hits."""
        found = self.list_sets(hits)
        summary = self.summarise(hits)
        hit = [each for each in found if each.hits.documents]
        kept = ", none dropped for them" if self._row_options.decontaminate_report_only else ""
        lines = {
            "test sets": f"{units.counted(hits.documents, 'document')} with questions of "
            f"{summary['sets_hit']} of {units.counted(len(found), 'set')}{kept}; "
            f"{summary['unprotected']:,} of {units.counted(summary['questions'], 'question')} "
            f"could not be compared; {save_dir}/{FILE} lists all"
        }
        for each in hit[:_SHOWN]:
            mark = f", over {100 * MOST_HIT:g} %" if each.share > MOST_HIT else ""
            documents = units.counted(each.hits.documents, "document")
            lines[f"  {each.test_set.name}"] = (
                f"{len(each.hits.questions):,} of {each.test_set.protected:,} compared questions "
                f"({100 * each.share:.1f} %{mark}) in {documents}"
            )
        if len(hit) > _SHOWN:
            lines["  more"] = f"{units.counted(len(hit) - _SHOWN, 'further set')} with hits"
        if clean := [each.test_set.name for each in found if not each.hits.documents]:
            lines["  clean"] = units.join_names(clean, _SHOWN)
        if hits.beginnings:
            lines["  beginnings"] = (
                f"only the beginning of {units.counted(hits.beginnings, 'large document')} was "
                "compared"
            )
        return lines
