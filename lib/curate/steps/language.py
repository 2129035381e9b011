"""Label each row with its language, and drop rows in languages that --language does not name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import declared, hashing, options, paths
from lib.core.declared import option
from lib.curate.classify import language, predictor
from lib.curate.classify.language import ALL, UNDETERMINED
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, StepResult

COLUMN = "language"
RULE = "language"  # in dropped.jsonl


@dataclass(frozen=True)
class LanguageOptions:
    """Declares the options of languages."""

    language: list[str] = option(
        [],
        group="languages",
        parse=options.parse_names,
        action="extend",
        metavar="en,de",
        help="label rows with their language in a column `language`, and keep only rows with "
        "these labels; `und` is the label of rows that are too short or below --language-score; "
        "`all` labels the rows and drops none (default: no labels)",
    )
    language_model: Path = option(
        paths.classifiers_root(Path(".cache")) / "lid.176.ftz",
        parse=Path,
        metavar="FILE",
        help="fastText model that recognises languages; its labels are the values of --language",
    )
    language_score: float = option(
        0.65,
        parse=options.fraction,
        metavar="F",
        help="mean probability below which the language of a row is `und`",
    )


@dataclass(frozen=True)
class LanguageLabels(CurationStep):
    """Adds the column `language`, and drops rows in other languages."""

    chosen: LanguageOptions

    name = "languages"
    options = LanguageOptions

    @classmethod
    def from_options(cls, chosen: LanguageOptions) -> LanguageLabels | None:
        """Return the step, None without --language.

        Raises UsageError if the package is not installed or the model has no such label, and
        ArtifactError if the model is missing or damaged.
        """
        if not chosen.language:
            declared.require_defaults(chosen, "--language")
            return None
        predictor.require_package("--language")
        language.require_labels(chosen.language, chosen.language_model)
        return cls(chosen)

    @property
    def kept(self) -> list[str]:
        """Return the labels of the rows to keep; an empty list keeps all rows."""
        return [] if self.chosen.language == [ALL] else self.chosen.language

    def identify(self) -> dict[str, Any]:
        """Return the labels, the lowest score and the digest of the model, but not its path."""
        return {
            "language": sorted(self.chosen.language),
            "language_score": self.chosen.language_score,
            "language_model": hashing.file_digest(self.chosen.language_model, "sha256"),
        }

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about languages."""
        choice = f"keep {', '.join(self.kept)}" if self.kept else "label all rows"
        score = f"{UNDETERMINED} below a score of {self.chosen.language_score:g}"
        return {"languages": f"{choice}; {score}, by {self.chosen.language_model}"}

    def list_rules(self) -> dict[str, str]:
        """Return the rule that drops rows in other languages, if any are dropped."""
        return {RULE: f"--language {','.join(self.kept)}"} if self.kept else {}

    def list_columns(self) -> dict[str, str]:
        """Return the column of the labels."""
        return {COLUMN: "string"}

    def start(self) -> RunningLabels:
        """Return what labels rows."""
        return RunningLabels(self)


class RunningLabels:
    """Labels rows, and drops those in other languages."""

    def __init__(self, step: LanguageLabels) -> None:
        self._kept = frozenset(step.kept)
        self._classifier = predictor.load_line_classifier(step.chosen.language_model)
        self._least = step.chosen.language_score

    def run(self, batch: RowBatch) -> StepResult:
        """Return the labels, and which rows are in other languages."""
        import numpy as np

        labels = language.find_languages(self._classifier, batch.texts, self._least)
        verdicts = []
        if self._kept:
            dropped = np.array([label not in self._kept for label in labels], bool)
            verdicts.append(RuleVerdict(RULE, dropped, labels))
        return StepResult(verdicts, {COLUMN: labels})

    def count(self) -> Counts:
        """Return nothing beyond what is counted for every rule."""
        return {}
