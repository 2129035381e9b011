"""Score each row with a classifier of quality, and drop rows with low scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import declared, hashing, options, units
from lib.core.declared import option
from lib.core.errors import Problems, UsageError
from lib.curate.classify import model_file, predictor, top_scores
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, Section, StepResult
from lib.curate.unit_files import KEPT

if TYPE_CHECKING:
    import numpy as np

    from lib.curate.whole import WholeDataset

COLUMN = "quality"
RULE = "quality model"  # in dropped.jsonl
DEFAULT_LABEL = "hq"  # the label of good texts in the classifiers that follow DataComp-LM
_SCORES = "scores"  # the sidecar
_MODEL = "--quality-model"
_LABEL = "--quality-label"
_SHOWN = 40  # labels in an error


@dataclass(frozen=True)
class ScoreOptions:
    """Declares the options of the classifier of quality."""

    quality_model: Path | None = option(
        None,
        group="quality model",
        parse=Path,
        metavar="FILE",
        help="fastText classifier whose probability for --quality-label becomes a column `quality` "
        "(default: no scores)",
    )
    quality_label: str | None = option(
        None,
        metavar="NAME",
        help="label of good texts in --quality-model, with or without __label__ (default: hq)",
    )
    quality_score: float | None = option(
        None,
        parse=options.fraction,
        metavar="F",
        help="drop rows with a lower score of --quality-model (default: drop none)",
    )
    keep_top: float | None = option(
        None,
        parse=options.fraction,
        metavar="F",
        help="keep this fraction of the rows that pass all rules for single rows: the rows "
        "with the highest scores of --quality-model (default: keep all)",
    )


@dataclass(frozen=True)
class QualityScores(CurationStep):
    """Adds the column `quality`, and drops the rows with the lowest scores.

    label: of good texts. least: the lowest score of a kept row, None to drop none. share: fraction
    of the rows to keep, None to keep all.
    """

    model: Path
    label: str
    least: float | None
    share: float | None

    name = "quality model"
    options = ScoreOptions

    @classmethod
    def from_options(cls, chosen: ScoreOptions) -> QualityScores | None:
        """Return the step, None without --quality-model.

        Raises UsageError if options contradict each other, the package is not installed or the
        model has no such label, and ArtifactError if the model is missing or damaged.
        """
        if chosen.quality_model is None:
            declared.require_defaults(chosen, f"{_MODEL} FILE")
            return None
        problems = Problems()
        if chosen.keep_top is not None and chosen.quality_score is not None:
            problems.add(
                "--keep-top and --quality-score exclude each other",
                expected="a share of the rows, or a score from which rows are kept",
            )
        if chosen.keep_top == 0:
            problems.add(
                "--keep-top 0 would keep no row", expected="a fraction above 0, such as 0.1"
            )
        problems.raise_if_any()
        predictor.require_package(_MODEL)
        require_label(chosen.quality_model, chosen.quality_label)
        label = chosen.quality_label or DEFAULT_LABEL
        return cls(chosen.quality_model, label, chosen.quality_score, chosen.keep_top)

    def identify(self) -> dict[str, Any]:
        """Return the choice of rows, the label and the digest of the model, but not its path."""
        return {
            "quality_model": hashing.file_digest(self.model, "sha256"),
            "quality_label": self.label,
            "quality_score": self.least,
            "keep_top": self.share,
        }

    def identify_first_pass(self) -> dict[str, Any]:
        """Return the identity without the share, which only `decide` reads."""
        return self.identify() | {"keep_top": None if self.share is None else "a fraction"}

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about scores."""
        choice = "keep all rows"
        if self.least is not None:
            choice = f"keep rows with a score of at least {self.least:g}"
        elif self.share is not None:
            choice = f"keep the {100 * self.share:g} % of the rows with the highest scores"
        return {"quality": f"{choice}, by {self.model}"}

    def list_rules(self) -> dict[str, str]:
        """Return the rule that drops rows for their scores, if any are dropped."""
        if self.least is not None:
            return {RULE: f"--quality-score {self.least:g}"}
        return {RULE: f"--keep-top {self.share:g}"} if self.share is not None else {}

    def list_decisions(self) -> list[str]:
        """Return the rule if it needs the scores of all rows."""
        return [RULE] if self.share is not None else []

    def list_columns(self) -> dict[str, str]:
        """Return the column of the scores."""
        return {COLUMN: "float"}

    def start(self) -> RunningScores:
        """Return what scores rows."""
        return RunningScores(self)

    def decide(self, dataset: WholeDataset) -> Counts:
        """Keep the share of rows with the highest scores; among equal scores, the first rows.

        Rows that a rule has dropped do not count.
        """
        import numpy as np

        if self.share is None:
            return {}
        rows = sum(len(numbers) for numbers, _ in list_candidates(dataset))
        count = top_scores.count_kept(rows, self.share)
        threshold = top_scores.find_threshold(
            lambda: (values for _, values in list_candidates(dataset)), count
        )
        selector = top_scores.Selector(threshold)
        bins = np.zeros(top_scores.BINS, np.int64)
        for numbers, values in list_candidates(dataset):
            bins += top_scores.count_bins(values)
            is_low = ~selector.select(values)
            dataset.fates.values[numbers[is_low]] = dataset.find_rule(RULE)
            dataset.values.values[numbers[is_low]] = values[is_low]
            dataset.release()
        return {"rows": rows, "kept": count, "score": threshold.score, "bins": bins.tolist()}

    def summarize(self, counts: Counts) -> dict[str, Any]:
        """Return how many rows were kept for their scores, and how the scores are distributed."""
        return {"quality": counts} if self.share is not None else {}

    def list_sections(self, counts: Counts) -> Iterator[Section]:
        """Yield a table of the scores if they select rows among all."""
        if self.share is None:
            return
        note = (
            f"Scores of the {counts['rows']:,} rows that no rule has dropped. The "
            f"{counts['kept']:,} rows with the highest scores were kept; the lowest kept score is "
            f"{counts['score']:.6g}."
        )
        width = 1 / top_scores.BINS
        rows = [
            (f"{number * width:.2f} to {(number + 1) * width:.2f}", f"{count:,}")
            for number, count in enumerate(counts["bins"])
        ]
        yield Section("Quality scores", note, ["score", "rows"], rows)

    def format_lines(self, counts: Counts) -> dict[str, str]:
        """Return how many rows were kept for their scores."""
        if self.share is None:
            return {}
        rows = units.counted(counts["rows"], "row")
        return {
            "quality": f"{counts['kept']:,} of {rows} were kept for their scores; the lowest "
            f"kept score is {counts['score']:.6g}"
        }


class RunningScores:
    """Scores rows, and drops those below --quality-score."""

    def __init__(self, step: QualityScores) -> None:
        self._step = step

    def run(self, batch: RowBatch) -> StepResult:
        """Return the scores, and which rows are below the lowest."""
        import numpy as np

        step = self._step
        values = score_texts(step.model, step.label, batch.texts)
        verdicts = []
        if step.least is not None:
            verdicts.append(RuleVerdict(RULE, np.array(values, np.float64) < step.least, values))
        sidecars = {_SCORES: np.array(values, np.float32)} if step.share is not None else {}
        return StepResult(verdicts, {COLUMN: values}, sidecars)

    def count(self) -> Counts:
        """Return nothing beyond what is counted for every rule."""
        return {}


def list_candidates(dataset: WholeDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers and scores of the rows that no rule has dropped, block by block."""
    import numpy as np

    for first, values in dataset.open(_SCORES, np.float32).blocks():
        rows = np.flatnonzero(dataset.fates.values[first : first + len(values)] == KEPT)
        dataset.fates.release()
        yield first + rows, values[rows]


def score_texts(model: Path, label: str, texts: Sequence[str]) -> list[float]:
    """Return the probability of a label for each text, 0 for a text without words."""
    name = label.removeprefix(model_file.PREFIX)
    return [dict(predictor.list_scores(model, text)).get(name, 0.0) for text in texts]


def require_label(model: Path, label: str | None) -> None:
    """Raise UsageError if a model lacks a label, and ArtifactError if it is missing or damaged.

    label: None for the default.
    """
    labels = model_file.read_labels(model, _MODEL)
    if (label or DEFAULT_LABEL).removeprefix(model_file.PREFIX) not in labels:
        problem = (
            f"{_LABEL}: {model} has no label {label}"
            if label
            else f"{_MODEL} {model} has no label {DEFAULT_LABEL}; "
            f"{_LABEL} must name the label of good texts"
        )
        raise UsageError(problem, expected=units.join_names(labels, _SHOWN))
