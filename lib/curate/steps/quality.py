"""Drop rows by the published quality rules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import declared, hashing, options, units
from lib.core.data_names import find_source
from lib.core.declared import option
from lib.core.errors import Problems, UsageError
from lib.curate import row_texts
from lib.curate.classify.language import UNDETERMINED
from lib.curate.quality import rules, thresholds, word_lists
from lib.curate.quality.judge import Judge, is_dropped
from lib.curate.quality.layout import Layout, find_layouts
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, StepResult
from lib.curate.words import WORDS, WordGroup

if TYPE_CHECKING:
    import numpy as np

    from lib.curate.reader import SourceDataset

MOST_CHARACTERS = 16_000_000  # the rules measure only so many characters of a text
_LANGUAGE = "language"  # a column of the input, or of an earlier step
_LAYOUTS = "layouts"
_SHOWN = 20  # sources that an error lists


@dataclass(frozen=True)
class QualityOptions:
    """Declares the options of the quality rules.

    language: declared by the step that labels rows.
    """

    language: list[str] = option([])
    quality: list[str] = option(
        [],
        group="quality rules",
        parse=thresholds.parse_families,
        action="extend",
        metavar="A,B",
        help=f"drop rows by published quality rules: {', '.join(thresholds.FAMILIES)}; the plan "
        "prints all thresholds. c4.min_sentences counts only the lines that C4 would keep "
        "(together with fineweb, also lines without an end mark), but a row is never cut (default: "
        "no rules)",
    )
    quality_set: list[str] = option(
        [],
        parse=thresholds.parse_settings,
        action="extend",
        metavar="NAME=X",
        help="replace thresholds of --quality, as in `gopher.min_words=30,c4.max_braces=off` "
        "(default: the published ones)",
    )
    quality_words: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="YAML or JSON file with stop words of other languages, and phrases by which C4 "
        "removes a line: `de: {stop_words: [der, die], phrases: [verwendet Cookies]}`. Without "
        "--language and a column `language`, the file contains one language, which applies to all "
        "rows (default: English)",
    )
    quality_except: list[str] = option(
        [],
        parse=options.parse_names,
        action="extend",
        metavar="A,B",
        help="do not apply the quality rules to these top-level directories of the column "
        "`source`, such as code and chats (default: apply them to all)",
    )


@dataclass(frozen=True)
class QualityRules(CurationStep):
    """Drops rows by published rules, such as Gopher's."""

    chosen: QualityOptions

    name = "quality rules"
    options = QualityOptions

    @classmethod
    def from_options(cls, chosen: QualityOptions) -> QualityRules | None:
        """Return the step, None without --quality. Raises UsageError if options contradict."""
        if not chosen.quality:
            declared.require_defaults(chosen, "--quality")
            return None
        rules.require_consistent(chosen.quality, chosen.quality_set)
        return cls(chosen)

    @cached_property
    def limits(self) -> dict[str, float | None]:
        """Return the thresholds in force, None for one that is off."""
        return thresholds.find_limits(self.chosen.quality, self.chosen.quality_set)

    def require_source(self, source: SourceDataset) -> None:
        """Raise UsageError if a rule lacks a list of words, or if an exempt source is unknown."""
        problems = Problems()
        languages = self.chosen.language
        is_labelled = bool(languages) or source.has_column(_LANGUAGE)
        words = self.chosen.quality_words
        problems.collect(partial(rules.require_lists, self.limits, words, languages, is_labelled))
        if self.chosen.quality_except:
            problems.collect(partial(require_sources, self.chosen.quality_except, source))
        problems.raise_if_any()

    def identify(self) -> dict[str, Any]:
        """Return the thresholds in force, the digest of the words and the exempt sources."""
        identity: dict[str, Any] = {
            "quality": [name for name in thresholds.FAMILIES if name in self.chosen.quality],
            "quality_set": {
                name: thresholds.OFF if limit is None else limit
                for name, limit in self.limits.items()
            },
        }
        if self.chosen.quality_words:
            identity["quality_words"] = hashing.file_digest(self.chosen.quality_words)
        if self.chosen.quality_except:
            identity["quality_except"] = sorted(self.chosen.quality_except)
        return identity

    def describe(self) -> dict[str, str]:
        """Return lines of the plan: the thresholds by family, and the sources that are exempt."""
        lines = thresholds.describe_limits(self.limits)
        if self.chosen.quality_except:
            lines["not judged"] = ", ".join(sorted(self.chosen.quality_except))
        return lines

    def list_rules(self) -> dict[str, str]:
        """Return the rules that are on, in the order of application."""
        typed = f"--quality {','.join(self.chosen.quality)}"
        return dict.fromkeys(thresholds.list_rules(self.limits), typed)

    def list_inputs(self) -> list[str]:
        """Return the column of languages, by which a row gets its list of words."""
        return [_LANGUAGE]

    def start(self) -> RunningRules:
        """Return what measures rows."""
        lists = word_lists.select_lists(self.chosen.quality_words)
        return RunningRules(Judge(self.limits, lists), self.chosen.quality_except)


class RunningRules:
    """Measures rows, and drops those beyond a threshold."""

    def __init__(self, judge: Judge, exempt: Sequence[str]) -> None:
        self._judge = judge
        self._exempt = frozenset(exempt)

    def run(self, batch: RowBatch) -> StepResult:
        """Return which rows each rule drops, and their figures."""
        verdicts = []
        for name, values in self._measure(batch).items():
            limit = self._judge.limits[name]
            assert limit is not None
            dropped = is_dropped(name, limit, values)
            figures = list(map(_simplify_count, values.tolist())) if dropped.any() else ()
            verdicts.append(RuleVerdict(name, dropped, figures))
        return StepResult(verdicts)

    def count(self) -> Counts:
        """Return nothing beyond what is counted for every rule."""
        return {}

    def _measure(self, batch: RowBatch) -> dict[str, np.ndarray]:
        """Return the figures of a batch by rule, NaN for the rows of exempt sources."""
        import numpy as np

        rows = batch.rows
        is_exempt = np.array([find_source(row.source) in self._exempt for row in rows], bool)
        if is_exempt.all():
            return {name: np.full(len(rows), np.nan) for name in self._judge.rules}
        languages = [""] * len(rows)
        if _LANGUAGE in batch.columns:
            languages = [name or UNDETERMINED for name in batch.columns[_LANGUAGE]]
        figures = self._judge.measure(batch.memo(_LAYOUTS, _find_layouts), languages)
        if is_exempt.any():
            for values in figures.values():
                values[is_exempt] = np.nan
        return figures


def _find_layouts(batch: RowBatch) -> list[tuple[list[int], Layout]]:
    """Return the layouts of a batch, and share their words with other steps."""
    layouts = find_layouts([text[:MOST_CHARACTERS] for text in batch.texts])
    if all(len(text) <= MOST_CHARACTERS for text in batch.texts):
        groups = [WordGroup(members, layout.words) for members, layout in layouts]
        batch.memo(WORDS, lambda _: groups)
    return layouts


def _simplify_count(value: float) -> float | int:
    """Return a count as an integer."""
    return int(value) if value.is_integer() else value


def require_sources(names: Sequence[str], source: SourceDataset) -> None:
    """Raise UsageError if no row is from a source that --quality-except names."""
    if not source.has_column("source"):
        raise UsageError(
            f"--quality-except needs a column `source`, which {source.dataset.path} lacks",
            hint="stage 02 writes it with --keep-source",
        )
    known: set[str] = set()
    for unit in source.units:
        for batch in unit.read():
            known |= {find_source(value) for value in set(row_texts.list_sources(batch))}
        if known.issuperset(names):
            return
    problems = Problems()
    for name in sorted({*names} - known):
        near = difflib.get_close_matches(name, known - {""}, n=1)
        problems.add(
            f"--quality-except: there is no source {name!r}"
            + (f"; the nearest is {near[0]}" if near else ""),
            expected="top-level directories of the column `source`: "
            + (units.join_names(sorted(known - {""}), _SHOWN) or "there are none"),
        )
    problems.raise_if_any()
