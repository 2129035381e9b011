"""Load fastText classifiers and classify texts with them.

The package fasttext-predict is imported only here. It is optional, so stage 02 checks its presence
and the model file before it reads any file of the input.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Protocol

from lib.core import commands
from lib.core.errors import ArtifactError, UsageError
from lib.corpus.classify import model_file

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


def require_package(option: str) -> None:
    """Raise UsageError if the package that reads fastText models is not installed."""
    if importlib.util.find_spec("fasttext") is None:
        raise UsageError(
            f"{option} needs the package {_PACKAGE}, which is not installed",
            run=f"{commands.pip_install_optional(_PACKAGE)}\n{commands.as_typed()}",
        )


@cache
def load_classifier(path: Path) -> Classifier:
    """Return a classifier. Its file must have passed `model_file.read_labels` before."""
    import fasttext

    try:
        classifier: Classifier = fasttext.load_model(str(path))
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"fastText cannot open {path}", found=str(error)) from None
    return classifier


def list_scores(classifier: Classifier, text: str, least: float = 0.0) -> list[tuple[str, float]]:
    """Return the labels of a text, without their prefix, with their probabilities.

    The text counts as one line; lone surrogates in it are replaced. Labels with a probability below
    `least` are omitted. A text without words may have no label.
    """
    line = text.replace("\n", " ")
    if not line.isascii():
        line = line.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    try:
        labels, scores = classifier.predict(line, -1, least)
    except RuntimeError as error:  # fastText found NaN in the model
        raise ArtifactError("the model of a classifier is damaged", found=str(error)) from None
    names = (label.removeprefix(model_file.PREFIX) for label in labels)
    return list(zip(names, scores, strict=True))
