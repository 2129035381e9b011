"""Score each row with a classifier of quality that the user supplies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lib.core import declared, hashing, units
from lib.core.errors import Problems, UsageError
from lib.corpus.row_batch import BatchRule, RowBatch, RowVerdict
from lib.corpus.row_options import RowOptions
from lib.curate.classify import model_file, predictor

if TYPE_CHECKING:
    import numpy as np

COLUMN = "quality"
KIND = "quality model"  # the kind of the rule, and of the decision of --keep-top
DEFAULT_LABEL = "hq"  # the label of good texts in the classifiers that follow DataComp-LM
_OPTION = "--quality-model"
_LABEL_OPTION = "--quality-label"
_SHOWN = 40  # labels in an error
_NEEDING_MODEL = ("quality_label", "quality_score", "keep_top")


def score_batch(row_options: RowOptions, batch: RowBatch) -> list[float]:
    """Return the probability of the quality label for each row, 0 for a text without words."""
    assert row_options.quality_model
    label = (row_options.quality_label or DEFAULT_LABEL).removeprefix(model_file.PREFIX)
    return [
        dict(predictor.list_scores(row_options.quality_model, text)).get(label, 0.0)
        for text in batch.texts
    ]


def collect_scores(batch: RowBatch, row_options: RowOptions) -> np.ndarray:
    """Return the values of the column `quality` for a batch (float32 [rows])."""
    import numpy as np

    return np.array(batch.columns[COLUMN], np.float32)


def list_rules(row_options: RowOptions) -> list[str]:
    """Return the kind of the rule about scores."""
    return [KIND]


def start_rules(row_options: RowOptions) -> list[BatchRule]:
    """Return the rule that drops rows below --quality-score."""
    least = row_options.quality_score
    assert least is not None
    reason = f"below --quality-score {least:g}"
    return [BatchRule(KIND, reason, partial(_check_rows, least))]


def _check_rows(least: float, batch: RowBatch) -> RowVerdict:
    import numpy as np

    scores = batch.columns[COLUMN]
    return RowVerdict(np.array(scores, np.float64) < least, scores)


def require_scores(row_options: RowOptions) -> None:
    """Raise an error if rows cannot be scored with the options.

    UsageError: options contradict each other, the package is not installed, or the model has no
    such label. ArtifactError: the model is missing or damaged.
    """
    problems = Problems()
    if row_options.quality_model is None:
        for name in _NEEDING_MODEL:
            if getattr(row_options, name) is not None:
                option = declared.flag(name)
                problems.add(
                    f"{option} needs {_OPTION}", expected=f"{_OPTION} FILE, or no {option}"
                )
        problems.raise_if_any()
        return
    if row_options.keep_top is not None and row_options.quality_score is not None:
        problems.add(
            "--keep-top and --quality-score exclude each other",
            expected="a share of the rows, or a score from which rows are kept",
        )
    if row_options.keep_top == 0:
        problems.add("--keep-top 0 would keep no row", expected="a fraction above 0, such as 0.1")
    problems.raise_if_any()
    predictor.require_package(_OPTION)
    labels = model_file.read_labels(row_options.quality_model, _OPTION)
    label = row_options.quality_label
    if (label or DEFAULT_LABEL).removeprefix(model_file.PREFIX) not in labels:
        problem = (
            f"{_LABEL_OPTION}: {row_options.quality_model} has no label {label}"
            if label
            else f"{_OPTION} {row_options.quality_model} has no label {DEFAULT_LABEL}; "
            f"{_LABEL_OPTION} must name the label of good texts"
        )
        raise UsageError(problem, expected=units.join_names(labels, _SHOWN))


def describe_scores(row_options: RowOptions) -> dict[str, str]:
    """Return the line of the plan about scores by its label; {} without a classifier."""
    if row_options.quality_model is None:
        return {}
    choice = "keep all rows"
    if row_options.quality_score is not None:
        choice = f"keep rows with a score of at least {row_options.quality_score:g}"
    elif row_options.keep_top is not None:
        choice = f"keep the {100 * row_options.keep_top:g} % of the rows with the highest scores"
    return {"quality": f"{choice}, by {row_options.quality_model}"}


def identify_scores(row_options: RowOptions) -> dict[str, Any]:
    """Return the entry of the classifier in the identity of a dataset; {} without one.

    It contains the digest of the file and not its path.
    """
    if row_options.quality_model is None:
        return {}
    return {"quality_model": hashing.file_digest(row_options.quality_model, "sha256")}
