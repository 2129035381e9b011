"""Load fastText classifiers and classify texts with them.

The package fasttext-predict is imported only here. It is optional, so stage 02 checks its presence
and the model file before it reads any file of the input.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lib.core import commands
from lib.core.errors import ArtifactError, UsageError
from lib.corpus.classify import model_file, ngram_classifier

if TYPE_CHECKING:
    import numpy as np

_PACKAGE = "fasttext-predict"
_SAMPLE = (
    "the quick brown fox jumps over the lazy dog",
    "pójdź, kińże tę chmurność w głąb flaszy 1234567890",
    "съешь же ещё этих мягких французских булок, да выпей чаю",
    "いろはにほへとちりぬるを",
    "",
)
_TOLERANCE = 1e-4


class Classifier(Protocol):
    """Classifies a line of text."""

    def predict(
        self, text: str, k: int, threshold: float
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Return the `k` likeliest labels (-1: all) with their probabilities, the highest first.

        threshold: labels with a smaller probability are omitted.
        """
        ...


class LineClassifier(Protocol):
    """Computes the scores of all labels for many lines at once. labels: sorted."""

    labels: list[str]

    def score_lines(self, lines: Sequence[bytes], least: float) -> np.ndarray:
        """Return the probability of each label (float32 [lines, labels]), 0 if it is below `least`.

        lines: UTF-8 without newlines.
        """
        ...


class _LibraryClassifier:
    """Computes the scores of lines with fasttext-predict, one line after the other."""

    def __init__(self, path: Path) -> None:
        load_classifier(path)  # an error comes before the first line
        self._path = path
        self.labels = sorted(model_file.read_labels(path, "--language-model"))
        self._numbers = {label: number for number, label in enumerate(self.labels)}

    def score_lines(self, lines: Sequence[bytes], least: float) -> np.ndarray:
        import numpy as np

        scores = np.zeros((len(lines), len(self.labels)), np.float32)
        for row, line in zip(scores, lines, strict=True):
            for label, score in list_scores(self._path, line.decode(), least):
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
    """Return a classifier for lines. Its file must have passed `model_file.read_labels` before.

    NgramClassifier computes the scores if it can read the model and agrees with fasttext-predict on
    a few lines.
    """
    library = _LibraryClassifier(path)
    ngram_model = ngram_classifier.open_model(path)
    return ngram_model if ngram_model and _have_same_results(ngram_model, library) else library


def _have_same_results(one: LineClassifier, two: LineClassifier) -> bool:
    import numpy as np

    lines = [line.encode() for line in _SAMPLE]
    expected = two.score_lines(lines, 0.0)
    return one.labels == two.labels and np.allclose(
        one.score_lines(lines, 0.0), expected, atol=_TOLERANCE
    )


def encode_line(text: str) -> bytes:
    """Return a text as one line of UTF-8; lone surrogates in it are replaced."""
    line = text.replace("\n", " ")
    try:
        return line.encode()
    except UnicodeEncodeError:
        return line.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def list_scores(path: Path, text: str, least: float = 0.0) -> list[tuple[str, float]]:
    """Return the labels of a text, without their prefix, with their probabilities.

    path: the model, as for `load_classifier`. The text counts as one line; lone surrogates in it
    are replaced. Labels with a probability below `least` are omitted. A text without words may have
    no label. Raises ArtifactError if the model contains NaN.
    """
    try:
        labels, scores = load_classifier(path).predict(encode_line(text).decode(), -1, least)
    except RuntimeError as error:  # fastText found NaN in the model
        raise ArtifactError(
            f"{path} is damaged", expected="an intact fastText model", found=str(error)
        ) from None
    names = (label.removeprefix(model_file.PREFIX) for label in labels)
    return list(zip(names, scores, strict=True))
