"""Read the lists of words and phrases that the quality rules of a language need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import config_file
from lib.core.errors import Problems, UsageError
from lib.curate.words import find_words

ENGLISH = "en"
STOP_WORDS = "stop_words"
PHRASES = "phrases"
EXAMPLE = 'de: {stop_words: [der, die, und], phrases: ["verwendet Cookies"]}'


class WordLists(NamedTuple):
    """Contains the lists of a language: stop words, and phrases of lines that C4 removes."""

    stop_words: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()


ENGLISH_LISTS = WordLists(
    ("the", "be", "to", "of", "and", "that", "have", "with"),
    (
        *("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies"),
        *("use of cookies", "use cookies"),
    ),
)


def read_word_lists(path: Path) -> dict[str, WordLists]:
    """Return the lists of each language in a YAML or JSON file.

    Raises UsageError if the file contains anything but lists of words.
    """
    content = config_file.read_yaml(path, "--quality-words: ")
    problems = Problems()
    lists: dict[str, WordLists] = {}
    for language, value in content.items():
        if not _is_language(value) or not isinstance(language, str):
            problems.add(
                f"--quality-words: {path} contains no lists of words for {language!r}",
                expected=f"lines such as {EXAMPLE}",
                found=repr(value)[:200],
            )
        else:
            lists[language] = WordLists(
                tuple(value.get(STOP_WORDS, ())), tuple(value.get(PHRASES, ()))
            )
    problems.raise_if_any()
    if not lists:
        raise UsageError(f"--quality-words: {path} is empty", expected=f"lines such as {EXAMPLE}")
    return lists


def _is_language(value: Any) -> bool:
    """Return whether a value contains lists of phrases under the two known keys."""
    return (
        isinstance(value, dict)
        and value.keys() <= {STOP_WORDS, PHRASES}
        and all(
            isinstance(phrases, list) and all(map(_has_words, phrases))
            for phrases in value.values()
        )
    )


def _has_words(phrase: Any) -> bool:
    return isinstance(phrase, str) and any(
        len(group.words.hashes) for group in find_words([phrase])
    )


def select_lists(path: Path | None) -> Mapping[str, WordLists]:
    """Return the lists by the language of a row; the key "" is for rows of unknown language.

    Those are in the one language of the file, or in English. path: value of --quality-words.
    """
    lists = read_word_lists(path) if path else {}
    only = next(iter(lists.values())) if len(lists) == 1 else ENGLISH_LISTS
    return {"": only, ENGLISH: ENGLISH_LISTS, **lists}
