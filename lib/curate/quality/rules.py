"""Drop rows by the quality rules: check their options, and start the rules for a worker."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import hashing, units
from lib.core.data_names import find_source
from lib.core.errors import Problems
from lib.corpus.inputs import InputFile
from lib.corpus.row_batch import BatchRule, RowBatch, RowVerdict
from lib.corpus.row_options import RowOptions
from lib.curate.quality import thresholds, word_lists
from lib.curate.quality.judge import Judge, is_dropped, is_minimum
from lib.curate.quality.layout import Layout, find_layouts
from lib.curate.words import WORDS, WordGroup

if TYPE_CHECKING:
    import numpy as np

MOST_CHARACTERS = 16_000_000  # the rules measure only so many characters of a text
_FIGURES = "quality figures"
_NO_LANGUAGES = {"all", "und"}  # values of --language that name no language
_SHOWN = 20  # sources that an error lists


def list_rules(row_options: RowOptions) -> list[str]:
    """Return the names of the rules that are on, in the order of application."""
    return _make_judge(row_options).rules if row_options.quality else []


def start_rules(row_options: RowOptions) -> list[BatchRule]:
    """Return the rules that are on, in the order of application."""
    judge = _make_judge(row_options)
    exempt = frozenset(row_options.quality_except)
    rules = []
    for name in judge.rules:
        limit = judge.limits[name]
        assert limit is not None
        side = "below" if is_minimum(name) else "above"
        meaning = thresholds.THRESHOLDS[name].meaning
        reason = f"{side} {name}={limit:.10g} ({meaning})"
        rules.append(BatchRule(name, reason, partial(_check_rows, judge, exempt, name, limit)))
    return rules


def _check_rows(
    judge: Judge, exempt: frozenset[str], name: str, limit: float, batch: RowBatch
) -> RowVerdict:
    """Return which rows of a batch a rule drops."""
    values = batch.memo(_FIGURES, lambda row_batch: _measure_batch(judge, exempt, row_batch))[name]
    dropped = is_dropped(name, limit, values)
    return RowVerdict(dropped, list(map(_simplify_count, values.tolist())) if dropped.any() else ())


def _simplify_count(value: float) -> float | int:
    """Return a count as an integer."""
    return int(value) if value.is_integer() else value


def _measure_batch(judge: Judge, exempt: frozenset[str], batch: RowBatch) -> dict[str, np.ndarray]:
    """Return the figures of a batch, NaN for the rows of exempt sources."""
    import numpy as np

    is_exempt = np.array([find_source(row.source) in exempt for row in batch.rows], bool)
    if is_exempt.all():
        return {name: np.full(len(batch.rows), np.nan) for name in judge.rules}
    languages = batch.columns.get("language", [""] * len(batch.rows))
    figures = judge.measure(batch.memo("layouts", _find_layouts), languages)
    if is_exempt.any():
        for values in figures.values():
            values[is_exempt] = np.nan
    return figures


def _find_layouts(batch: RowBatch) -> list[tuple[list[int], Layout]]:
    """Return the layouts of a batch, and share their words with other rules and sidecars."""
    layouts = find_layouts([text[:MOST_CHARACTERS] for text in batch.texts])
    if all(len(text) <= MOST_CHARACTERS for text in batch.texts):
        groups = [WordGroup(members, layout.words) for members, layout in layouts]
        batch.memo(WORDS, lambda _: groups)
    return layouts


def _make_judge(row_options: RowOptions) -> Judge:
    return _cache_judge(
        tuple(row_options.quality),
        tuple(row_options.quality_set),
        row_options.quality_words,
        tuple(row_options.language),
    )


@cache
def _cache_judge(
    families: tuple[str, ...],
    settings: tuple[str, ...],
    words: Path | None,
    languages: tuple[str, ...],
) -> Judge:
    """Return the judge for some options; a worker makes it once."""
    return Judge(
        thresholds.find_limits(families, settings), word_lists.select_lists(words, languages)
    )


def require_quality(row_options: RowOptions) -> None:
    """Raise UsageError if options of the quality rules contradict each other.

    Also raises it if a rule needs a word list of a language that has none.
    """
    problems = Problems()
    families = row_options.quality
    for option in ("quality_set", "quality_words", "quality_except"):
        if getattr(row_options, option) and not families:
            problems.add(
                f"--{option.replace('_', '-')} needs --quality",
                expected=f"--quality with some of {','.join(thresholds.FAMILIES)}",
            )
    for setting in row_options.quality_set if families else ():
        name = thresholds.read_setting(setting)[0]
        if thresholds.find_family(name) not in families:
            problems.add(
                f"--quality-set {setting} needs --quality {thresholds.find_family(name)}",
                found=f"--quality {','.join(families)}",
            )
    for name, values in thresholds.group_settings(row_options.quality_set).items():
        if len(values) > 1:
            problems.add(f"--quality-set gives {name} several values", found=", ".join(values))
    limits = thresholds.find_limits(families, row_options.quality_set)
    for name, least in limits.items():
        opposite = name.replace(".min_", ".max_")
        most = limits.get(opposite) if opposite != name else None
        if least is not None and most is not None and least > most:
            problems.add(
                f"no row can pass {name}={least:g} and {opposite}={most:g}",
                expected=f"{name} of at most {most:g}, or {opposite} of at least {least:g}",
            )
    if families:
        problems.collect(partial(_require_lists, row_options, problems))
    problems.raise_if_any()


def _require_lists(row_options: RowOptions, problems: Problems) -> None:
    """Add a problem for each language without a list of words that a rule needs."""
    limits = thresholds.find_limits(row_options.quality, row_options.quality_set)
    languages = row_options.language
    lists = word_lists.select_lists(row_options.quality_words, languages)
    named = [name for name in languages if name not in _NO_LANGUAGES] if languages else [*lists]
    for threshold, key in (
        (thresholds.STOP_WORDS, word_lists.STOP_WORDS),
        (thresholds.PHRASES, word_lists.PHRASES),
    ):
        missing = [
            name for name in named if not getattr(lists.get(name, word_lists.WordLists()), key)
        ]
        if limits.get(threshold) and missing:
            problems.add(
                f"{threshold} needs a list of {key.replace('_', ' ')}"
                + (f" for {', '.join(missing)}" if any(missing) else ""),
                expected=f"--quality-words FILE, with lines such as {word_lists.EXAMPLE}",
                hint=f"--quality-set {threshold}=off switches the rule off",
            )


def require_sources(row_options: RowOptions, files: Sequence[InputFile]) -> None:
    """Raise UsageError if --quality-except names a source that no file is in."""
    known = {find_source(file.source) for file in files} - {""}
    problems = Problems()
    for name in row_options.quality_except:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.add(
                f"--quality-except: there is no source {name!r}"
                + (f"; the nearest is {near[0]}" if near else ""),
                expected="top-level directories of the source: "
                + (units.join_names(sorted(known), _SHOWN) or "there are none"),
            )
    problems.raise_if_any()


def identify_quality(row_options: RowOptions) -> dict[str, Any]:
    """Return the entries of the quality rules in the identity of a dataset, {} if no rule is on.

    They replace options of the same names by the thresholds in force and the digest of the words.
    """
    if not row_options.quality:
        return {}
    limits = thresholds.find_limits(row_options.quality, row_options.quality_set)
    identity: dict[str, Any] = {
        "quality": [name for name in thresholds.FAMILIES if name in row_options.quality],
        "quality_set": {
            name: thresholds.OFF if limit is None else limit for name, limit in limits.items()
        },
    }
    if row_options.quality_words:
        identity["quality_words"] = hashing.file_digest(row_options.quality_words)
    if row_options.quality_except:
        identity["quality_except"] = sorted({*row_options.quality_except})
    return identity


def describe_quality(row_options: RowOptions) -> dict[str, str]:
    """Return lines for the plan: the thresholds in force by family, and what the rules skip."""
    if not row_options.quality:
        return {}
    limits = thresholds.find_limits(row_options.quality, row_options.quality_set)
    lines = thresholds.describe_limits(limits)
    if row_options.quality_except:
        lines["not judged"] = ", ".join(sorted({*row_options.quality_except}))
    return lines
