"""Find words and phrases of a list in texts, by the hashes of their words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from lib.curate.words import Words, find_words

if TYPE_CHECKING:
    import numpy as np

_PREFIX_BITS = 12  # a table of all prefixes fits the fastest cache


class PhraseMatches(NamedTuple):
    """Contains the matches of a list, each as the number of its first word and of its phrase."""

    words: np.ndarray
    phrases: np.ndarray


class PhraseList:
    """Finds the words and phrases of a list in texts. lib/curate/words.py defines their words."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = tuple(dict.fromkeys(phrases))

    @cached_property
    def _hashes(self) -> list[np.ndarray]:
        return [group.words.hashes for phrase in self._phrases for group in find_words([phrase])]

    @cached_property
    def _is_start(self) -> np.ndarray:
        """Return whether a phrase may begin with a word, by the highest bits of the word's hash."""
        import numpy as np

        table = np.zeros(1 << _PREFIX_BITS, bool)
        for hashes in self._hashes:
            table[int(hashes[0]) >> (64 - _PREFIX_BITS)] = True
        return table

    def find(self, words: Words) -> PhraseMatches:
        """Return where the phrases are, in the order of the phrases and then of the words."""
        import numpy as np

        prefixes = (words.hashes >> np.uint64(64 - _PREFIX_BITS)).view(np.int64)
        starts = np.flatnonzero(self._is_start[prefixes])
        hashes = words.hashes[starts]
        matches_by_phrase: list[np.ndarray] = []
        for phrase in self._hashes:
            matches = starts[hashes == phrase[0]]
            for number, value in enumerate(phrase[1:], 1):
                matches = matches[matches + number < len(words.hashes)]
                matches = matches[words.hashes[matches + number] == value]
            if len(phrase) > 1:  # a match must not begin in one text and end in another
                ends = words.text_ends[np.searchsorted(words.text_ends, matches, "right")]
                matches = matches[matches + len(phrase) <= ends]
            matches_by_phrase.append(matches)
        numbers = np.repeat(
            np.arange(len(matches_by_phrase)),
            [len(phrase_matches) for phrase_matches in matches_by_phrase],
        )
        return PhraseMatches(np.concatenate([np.empty(0, np.int64), *matches_by_phrase]), numbers)

    def count_distinct(self, words: Words) -> np.ndarray:
        """Return how many different phrases each text contains."""
        import numpy as np

        texts = len(words.text_ends)
        matches = self.find(words)
        numbers = np.searchsorted(words.text_ends, matches.words, "right")
        occurs = np.zeros((texts, len(self._phrases)), bool)
        occurs[numbers, matches.phrases] = True
        return occurs.sum(axis=1)
