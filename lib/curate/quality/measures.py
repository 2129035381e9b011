"""Measure texts for the quality rules: one figure per text, for many texts at once.

There is one function for each family of rules. A figure is NaN if the rule cannot judge the text,
because the text has no words or lines, or because its script has no spaces and the rule needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from lib.curate.quality import repeats
from lib.curate.quality.layout import BULLET, ELLIPSIS, END_MARK, Layout
from lib.curate.quality.phrases import PhraseList

if TYPE_CHECKING:
    import numpy as np

TOP_GRAMS = (2, 3, 4)
REPEATED_GRAMS = (5, 6, 7, 8, 9, 10)
_LOREM_IPSUM = PhraseList(["lorem ipsum"])


class Texts:
    """Computes the figures of several texts that the families share.

    languages: the language of each text, None if it is unknown. Figures are arrays [texts] unless
    stated otherwise.
    """

    def __init__(self, layout: Layout, languages: Sequence[str | None]) -> None:
        self.layout = layout
        self.languages = languages

    @property
    def number(self) -> int:
        """Return the number of texts."""
        return len(self.languages)

    @cached_property
    def units(self) -> np.ndarray:
        """Return the number of characters in scripts without spaces."""
        import numpy as np

        is_unit = self.layout.words.is_unit
        if not is_unit.any():
            return np.zeros(self.number, np.int64)
        return repeats.find_lengths(
            np.searchsorted(np.flatnonzero(is_unit), self.layout.words.text_ends)
        )

    @cached_property
    def characters_before(self) -> np.ndarray:
        """Return the number of characters in all words before each word, [words + 1]."""
        import numpy as np

        words = self.layout.words
        before = np.zeros(len(words.starts) + 1, np.int64)
        np.cumsum(words.ends - words.starts, out=before[1:])
        return before

    @cached_property
    def words(self) -> np.ndarray:
        """Return the number of words; two characters of a script without spaces are one word."""
        return self.layout.words.counts - self.units / 2

    @cached_property
    def has_spaces(self) -> np.ndarray:
        """Return whether at least half of the words are written between spaces."""
        return self.layout.words.counts - self.units >= self.units / 2

    @cached_property
    def lines(self) -> np.ndarray:
        """Return the number of lines."""
        return self.layout.count_by_text(self.layout.starts)

    @cached_property
    def texts_of_lines(self) -> np.ndarray:
        """Return the number of the text of each line."""
        return self.layout.number_texts(self.layout.starts)

    @cached_property
    def repeated_lines(self) -> np.ndarray:
        """Return the lines that repeat an earlier one of their text."""
        return repeats.find_repeats(self.layout.hashes, self.texts_of_lines)

    @cached_property
    def repeated_line_characters(self) -> np.ndarray:
        """Return the share of the characters of lines that are in repeated lines."""
        lengths = self.layout.ends - self.layout.starts
        return divide_or_nan(self.sum_lines(lengths, self.repeated_lines), self.sum_lines(lengths))

    def sum_lines(self, values: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
        """Return the sum of the values of the lines of each text.

        values: [lines]. lines: selects the lines to include (default: all).
        """
        import numpy as np

        texts = self.texts_of_lines
        if lines is not None:
            values = values[lines]
            texts = texts[lines]
        return np.bincount(texts, values, self.number)

    def share_lines(self, is_counted: np.ndarray) -> np.ndarray:
        """Return the share of the lines of each text for which a value is true."""
        return divide_or_nan(self.sum_lines(is_counted), self.lines)


def divide_or_nan(values: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return quotients, NaN where the total is 0."""
    import numpy as np

    return np.divide(values, totals, out=np.full(len(totals), np.nan), where=totals > 0)


def measure_gopher(texts: Texts, stop_words: Mapping[str, PhraseList]) -> dict[str, np.ndarray]:
    """Return the figures of Gopher's quality rules. stop_words: by language."""
    import numpy as np

    layout = texts.layout
    words = texts.words
    characters = repeats.find_lengths(texts.characters_before[layout.words.text_ends])
    word_length = divide_or_nan(characters - texts.units, layout.words.counts - texts.units)
    word_length[~texts.has_spaces] = np.nan
    tokens = layout.count_by_text(layout.tokens)
    return {
        "words": words,
        "word_length": word_length,
        "hash_signs": divide_or_nan(layout.count_by_text(layout.hash_signs), words),
        "ellipses": divide_or_nan(layout.count_by_text(layout.ellipses), words),
        "bullet_lines": texts.share_lines((layout.flags & BULLET) != 0),
        "ellipsis_lines": texts.share_lines((layout.flags & ELLIPSIS) != 0),
        "letter_words": divide_or_nan(tokens - layout.count_by_text(layout.plain), tokens),
        "stop_words": count_stop_words(texts, stop_words),
    }


def count_stop_words(texts: Texts, lists: Mapping[str, PhraseList]) -> np.ndarray:
    """Return the number of different stop words in each text, NaN without a list for the text."""
    import numpy as np

    result = np.full(texts.number, np.nan)
    for language, phrases in lists.items():
        members = [number for number, name in enumerate(texts.languages) if name == language]
        if members:
            result[members] = phrases.count_distinct(texts.layout.words)[members]
    return result


def measure_gopher_repetition(texts: Texts) -> dict[str, np.ndarray]:
    """Return the figures of Gopher's repetition rules."""
    import numpy as np

    layout = texts.layout
    repeated = texts.repeated_lines
    figures = {
        "duplicate_lines": divide_or_nan(
            np.bincount(texts.texts_of_lines[repeated], None, texts.number), texts.lines
        ),
        "duplicate_line_characters": texts.repeated_line_characters,
        **_measure_paragraphs(texts),
    }
    words = layout.words
    shares = repeats.measure_grams(
        words.hashes, texts.characters_before, words.text_ends, TOP_GRAMS, REPEATED_GRAMS
    )
    is_exempt = ~(texts.has_spaces & (words.counts > 0))
    for n, share in shares.items():
        name = f"top_{n}_gram" if n in TOP_GRAMS else f"duplicate_{n}_grams"
        share[is_exempt] = np.nan
        figures[name] = share
    return figures


def _measure_paragraphs(texts: Texts) -> dict[str, np.ndarray]:
    """Return the share of paragraphs, and of characters in paragraphs, that are repeats.

    A blank line ends a paragraph. The hash of a paragraph is the sum of the hashes of its lines,
    each multiplied by a number for its place in the paragraph.
    """
    import numpy as np

    layout = texts.layout
    lines = len(layout.starts)
    if not lines:
        empty = np.full(texts.number, np.nan)
        return {"duplicate_paragraphs": empty, "duplicate_paragraph_characters": empty}
    of_texts = texts.texts_of_lines
    is_first = np.ones(lines, bool)
    is_first[1:] = (np.diff(layout.numbers) > 1) | (of_texts[1:] != of_texts[:-1])
    firsts = np.flatnonzero(is_first)
    sizes = np.diff(firsts, append=lines)
    places = np.arange(lines) - np.repeat(firsts, sizes)
    hashes = np.add.reduceat(layout.hashes * repeats.place_factors(places), firsts)
    characters = np.add.reduceat(layout.ends - layout.starts, firsts)
    paragraph_texts = of_texts[firsts]
    repeated = repeats.find_repeats(hashes, paragraph_texts)
    number = texts.number
    return {
        "duplicate_paragraphs": divide_or_nan(
            np.bincount(paragraph_texts[repeated], None, number),
            np.bincount(paragraph_texts, None, number),
        ),
        "duplicate_paragraph_characters": divide_or_nan(
            np.bincount(paragraph_texts[repeated], characters[repeated], number),
            np.bincount(paragraph_texts, characters, number),
        ),
    }


def measure_c4(
    texts: Texts, limits: Mapping[str, float], phrases: Mapping[str, PhraseList]
) -> dict[str, np.ndarray]:
    """Return the figures of C4's rules.

    limits: the thresholds of lines. phrases: by language, the phrases of lines that C4 removes.
    """
    layout = texts.layout
    is_kept = _select_c4_lines(texts, limits, phrases)
    return {
        "sentences": texts.sum_lines(1 + _count_breaks(layout), is_kept),
        "braces": layout.count_by_text(layout.braces),
        "lorem_ipsum": _LOREM_IPSUM.count_distinct(layout.words),
    }


def _select_c4_lines(
    texts: Texts, limits: Mapping[str, float], phrases: Mapping[str, PhraseList]
) -> np.ndarray:
    """Return which lines C4 keeps."""
    import numpy as np

    layout = texts.layout
    words = layout.words
    is_kept = layout.longest <= limits["max_word_characters"]
    if limits["end_marks"]:
        is_kept &= (layout.flags & (END_MARK | ELLIPSIS)) == END_MARK
    if len(layout.starts):
        first_words = np.searchsorted(words.starts, layout.starts)
        counts = np.diff(first_words, append=len(words.starts)).astype(float)
        if words.is_unit.any():
            units = np.append(0, np.cumsum(words.is_unit))
            counts -= np.diff(units[np.append(first_words, len(words.starts))]) / 2
        is_kept &= counts >= limits["min_line_words"]
    for language, phrase_list in phrases.items():
        if language not in texts.languages:
            continue
        lines_with_phrases = layout.find_lines(words.starts[phrase_list.find(words).words])
        if len(lines_with_phrases):
            is_language = np.array([name == language for name in texts.languages])
            is_kept[lines_with_phrases[is_language[texts.texts_of_lines[lines_with_phrases]]]] = (
                False
            )
    return is_kept


def _count_breaks(layout: Layout) -> np.ndarray:
    """Return the number of sentences that end before the end of each line."""
    import numpy as np

    if not len(layout.starts):
        return np.zeros(0, np.int64)
    lines = layout.find_lines(layout.breaks)
    return np.bincount(lines[layout.breaks < layout.ends[lines]], None, len(layout.starts))


def measure_fineweb(texts: Texts, limits: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return the figures of FineWeb's own rules. limits: the thresholds of lines."""
    layout = texts.layout
    lengths = layout.ends - layout.starts
    return {
        "end_mark_lines": texts.share_lines((layout.flags & END_MARK) != 0),
        "short_lines": texts.share_lines(lengths <= limits["short_line_characters"]),
        "duplicate_line_characters": texts.repeated_line_characters,
        "newlines": divide_or_nan(_count_newlines(layout), texts.words),
    }


def _count_newlines(layout: Layout) -> np.ndarray:
    """Return the newlines of each text, without the one that joins it to the next text."""
    import numpy as np

    counts = layout.count_by_text(layout.newlines)
    counts[:-1] -= 1
    return np.maximum(counts, 0)
