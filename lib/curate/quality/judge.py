"""Measure the texts of a batch for all quality rules that are on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lib.curate.quality import measures, thresholds
from lib.curate.quality.layout import Layout
from lib.curate.quality.measures import Texts
from lib.curate.quality.phrases import PhraseList
from lib.curate.quality.word_lists import WordLists

if TYPE_CHECKING:
    import numpy as np


class Judge:
    """Measures texts for the quality rules that are on.

    limits: see find_limits. lists: word lists by the language of a text. rules: the names of the
    rules that are on.
    """

    def __init__(self, limits: Mapping[str, float | None], lists: Mapping[str, WordLists]) -> None:
        self.limits = limits
        self.rules = thresholds.list_rules(limits)
        # Looked up once: in a batch of few rows, hundreds of short calls take most of the time.
        self._figures = [
            (name, thresholds.find_family(name), thresholds.find_figure(name))
            for name in self.rules
        ]
        self._line_limits = {
            family: thresholds.find_line_limits(limits, family)
            for family in map(thresholds.find_family, limits)
        }
        self._stop_words = {
            language: PhraseList(words.stop_words)
            for language, words in lists.items()
            if words.stop_words
        }
        self._phrases = {language: PhraseList(words.phrases) for language, words in lists.items()}

    def measure(
        self, layouts: Sequence[tuple[list[int], Layout]], languages: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Return the figure of each rule (float [texts]), NaN where the rule cannot judge a text.

        layouts: see find_layouts. languages: the language of each text of the batch.
        """
        import numpy as np

        results = {name: np.full(len(languages), np.nan) for name in self.rules}
        for members, layout in layouts:
            texts = Texts(layout, [languages[number] for number in members])
            figures = {family: self._measure_family(family, texts) for family in self._line_limits}
            for name, family, figure_name in self._figures:
                figure = figures[family][figure_name]
                if len(members) == len(languages):
                    results[name] = figure.astype(np.float64)
                else:
                    results[name][members] = figure
        return results

    def _measure_family(self, family: str, texts: Texts) -> dict[str, np.ndarray]:
        """Return the figures of a family."""
        limits = self._line_limits[family]
        if family == thresholds.GOPHER:
            return measures.measure_gopher(texts, self._stop_words)
        if family == thresholds.REPETITION:
            return measures.measure_gopher_repetition(texts)
        if family == thresholds.C4:
            return measures.measure_c4(texts, limits, self._phrases if limits["phrases"] else {})
        return measures.measure_fineweb(texts, limits)


def is_dropped(name: str, limit: float, values: np.ndarray) -> np.ndarray:
    """Return which values are beyond the limit of a rule (bool [texts]); NaN never is."""
    return values < limit if is_minimum(name) else values > limit


def is_minimum(name: str) -> bool:
    """Return whether the threshold of a rule is a minimum."""
    return name.partition(".")[2].startswith("min_")
