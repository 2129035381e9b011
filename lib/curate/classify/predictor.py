"""Load fastText classifiers and classify texts with them.

The package fasttext-predict is imported only here. It is optional, so the steps check its
presence and the model file before any row is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lib.core import commands
from lib.core.errors import ArtifactError, UsageError
from lib.curate.classify import model_file

if TYPE_CHECKING:
    import numpy as np

_PACKAGE = "fasttext-predict"


class Classifier(Protocol):
    """Classifies a line of text."""

    def predict(
        self, text: str, k: int, threshold: float
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Return the `k` likeliest labels (-1: all) with their probabilities, the highest first.

        threshold: labels with a smaller probability are omitted.
        """
        ...


class LineClassifier:
    """Computes the scores of all labels for lines of text. labels: sorted.

    path: the model, as for `load_classifier`.
    """

    def __init__(self, path: Path) -> None:
        load_classifier(path)  # an error comes before the first line
        self._path = path
        self.labels = sorted(model_file.read_labels(path, "--language-model"))
        self._numbers = {label: number for number, label in enumerate(self.labels)}

    def score_lines(self, lines: Sequence[str], least: float) -> np.ndarray:
        """Return the probability of each label (float32 [lines, labels]), 0 if it is below `least`.

        lines: see `list_scores`.
        """
        import numpy as np

        scores = np.zeros((len(lines), len(self.labels)), np.float32)
        for row, line in zip(scores, lines, strict=True):
            for label, score in list_scores(self._path, line, least):
                row[self._numbers[label]] = score
        return scores


def require_package(option: str) -> None:
    """Raise UsageError if the package that reads fastText models is not installed."""
    if importlib.util.find_spec("fasttext") is None:
        raise UsageError(
            f"{option} needs the package {_PACKAGE}, which is not installed",
            run=f"{commands.pip_install_optional(_PACKAGE)}\n{commands.as_typed()}",
        )


@cache
def load_classifier(path: Path) -> Classifier:
    """Return a classifier. Its file must have passed `model_file.read_labels` before.

    Raises ArtifactError if fastText cannot open the file.
    """
    import fasttext

    try:
        classifier: Classifier = fasttext.load_model(str(path))
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"fastText cannot open {path}", found=str(error)) from None
    return classifier


@cache
def load_line_classifier(path: Path) -> LineClassifier:
    """Return a classifier for lines. Its file must have passed `model_file.read_labels` before."""
    return LineClassifier(path)


def _make_line(text: str) -> str:
    """Return a text as one line; lone surrogates in it are replaced."""
    line = text.replace("\n", " ")
    try:
        line.encode()
    except UnicodeEncodeError:
        return line.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return line


def list_scores(path: Path, text: str, least: float = 0.0) -> list[tuple[str, float]]:
    """Return the labels of a text, without their prefix, with their probabilities.

    path: the model, as for `load_classifier`. The text counts as one line; lone surrogates in it
    are replaced. Labels with a probability below `least` are omitted. A text without words may have
    no label. Raises ArtifactError if the model contains NaN.
    """
    try:
        labels, scores = load_classifier(path).predict(_make_line(text), -1, least)
    except RuntimeError as error:  # fastText found NaN in the model
        raise ArtifactError(
            f"{path} is damaged", expected="an intact fastText model", found=str(error)
        ) from None
    names = (label.removeprefix(model_file.PREFIX) for label in labels)
    return list(zip(names, scores, strict=True))
