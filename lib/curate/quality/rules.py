"""Check the options of the quality rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lib.core.errors import Problems, UsageError
from lib.curate.quality import thresholds, word_lists
from lib.curate.quality.word_lists import WordLists

_NO_LANGUAGES = {"all", "und"}  # values of --language that name no language


def require_consistent(families: Collection[str], settings: Sequence[str]) -> None:
    """Raise UsageError if the thresholds of --quality-set contradict each other, or --quality."""
    problems = Problems()
    for setting in settings:
        name = thresholds.read_setting(setting)[0]
        if thresholds.find_family(name) not in families:
            problems.add(
                f"--quality-set {setting} needs --quality {thresholds.find_family(name)}",
                found=f"--quality {','.join(families)}",
            )
    for name, values in thresholds.group_settings(settings).items():
        if len(values) > 1:
            problems.add(f"--quality-set gives {name} several values", found=", ".join(values))
    limits = thresholds.find_limits(families, settings)
    for name, least in limits.items():
        opposite = name.replace(".min_", ".max_")
        most = limits.get(opposite) if opposite != name else None
        if least is not None and most is not None and least > most:
            problems.add(
                f"no row can pass {name}={least:g} and {opposite}={most:g}",
                expected=f"{name} of at most {most:g}, or {opposite} of at least {least:g}",
            )
    problems.raise_if_any()


def require_lists(
    limits: Mapping[str, float | None],
    words: Path | None,
    languages: Sequence[str],
    is_labelled: bool,
) -> None:
    """Raise UsageError if a rule needs a list of words that is missing.

    words, languages: values of --quality-words and --language. is_labelled: whether the language of
    each row is known.
    """
    lists = word_lists.select_lists(words)
    if not is_labelled and words and len(known := word_lists.read_word_lists(words)) > 1:
        raise UsageError(
            f"--quality-words: {words} contains the languages {', '.join(known)}, and the language "
            "of a row is not known",
            expected="--language, or a file with one language",
        )
    named = [name for name in languages if name not in _NO_LANGUAGES] if is_labelled else [""]
    problems = Problems()
    for threshold, key in (
        (thresholds.STOP_WORDS, word_lists.STOP_WORDS),
        (thresholds.PHRASES, word_lists.PHRASES),
    ):
        missing = [name for name in named if not getattr(lists.get(name, WordLists()), key)]
        if limits.get(threshold) and missing:
            problems.add(
                f"{threshold} needs a list of {key.replace('_', ' ')}"
                + (f" for {', '.join(missing)}" if any(missing) else ""),
                expected=f"--quality-words FILE, with lines such as {word_lists.EXAMPLE}",
                hint=f"--quality-set {threshold}=off switches the rule off",
            )
    problems.raise_if_any()
