"""Name the quality rules and their thresholds, and read their options.

The name of a threshold is `family.name`. The name of a rule begins with `min_` or `max_`; the rest
is the name of its figure (measures.py). The other thresholds define which lines count.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lib.curate.quality.measures import REPEATED_GRAMS, TOP_GRAMS

GOPHER = "gopher"
REPETITION = "gopher-repetition"
C4 = "c4"
FINEWEB = "fineweb"
FAMILIES = GOPHER, REPETITION, C4, FINEWEB
OFF = "off"
_SIMILAR = 0.5  # the lowest similarity by difflib of a suggested name
STOP_WORDS = "gopher.min_stop_words"
PHRASES = "c4.phrases"
END_MARKS = "c4.end_marks"
_MOST_REPEATED = {2: 0.20, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class QualityThreshold(NamedTuple):
    """Describes a threshold.

    default: the published value. is_rule: whether the threshold alone can drop a row. off: the
    value that switches off a threshold of lines.
    """

    default: float
    is_rule: bool = True
    off: float = 0


# A comment describes the figure of a rule, or the threshold of lines.
THRESHOLDS: dict[str, QualityThreshold] = {
    "gopher.min_words": QualityThreshold(50),  # words
    "gopher.max_words": QualityThreshold(100_000),  # words
    "gopher.min_word_length": QualityThreshold(3),  # mean characters of a word
    "gopher.max_word_length": QualityThreshold(10),  # mean characters of a word
    "gopher.max_hash_signs": QualityThreshold(0.1),  # characters `#` ÷ words
    "gopher.max_ellipses": QualityThreshold(0.1),  # ellipses (`...` or `…`) ÷ words
    "gopher.max_bullet_lines": QualityThreshold(0.9),  # share of lines that begin with a bullet
    "gopher.max_ellipsis_lines": QualityThreshold(0.3),  # share of lines that end with an ellipsis
    "gopher.min_letter_words": QualityThreshold(0.8),  # share of tokens that contain a letter
    "gopher.min_stop_words": QualityThreshold(2),  # different stop words
    # share of lines that are repeats
    "gopher-repetition.max_duplicate_lines": QualityThreshold(0.30),
    # share of the characters of lines in repeats
    "gopher-repetition.max_duplicate_line_characters": QualityThreshold(0.20),
    # share of paragraphs that are repeats
    "gopher-repetition.max_duplicate_paragraphs": QualityThreshold(0.30),
    # share of the characters in repeated paragraphs
    "gopher-repetition.max_duplicate_paragraph_characters": QualityThreshold(0.20),
    **{
        # share of the characters of words in the most frequent n-gram
        f"gopher-repetition.max_top_{n}_gram": QualityThreshold(_MOST_REPEATED[n])
        for n in TOP_GRAMS
    },
    **{
        # share of the characters of words in repeated n-grams
        f"gopher-repetition.max_duplicate_{n}_grams": QualityThreshold(_MOST_REPEATED[n])
        for n in REPEATED_GRAMS
    },
    "c4.min_sentences": QualityThreshold(3),  # sentences in the lines that C4 keeps
    "c4.max_braces": QualityThreshold(0),  # characters `{`
    "c4.max_lorem_ipsum": QualityThreshold(0),  # whether the text contains `lorem ipsum` (1 or 0)
    "c4.min_line_words": QualityThreshold(5, False),  # fewest words in a line that C4 keeps
    # longest token in a line that C4 keeps, in characters
    "c4.max_word_characters": QualityThreshold(1000, False, math.inf),
    END_MARKS: QualityThreshold(1, False),  # 1: C4 keeps only lines that end with an end mark
    PHRASES: QualityThreshold(1, False),  # 1: C4 removes lines with `javascript` or a cookie phrase
    # share of lines that end with an end mark
    "fineweb.min_end_mark_lines": QualityThreshold(0.12),
    "fineweb.max_short_lines": QualityThreshold(0.67),  # share of short lines
    # longest short line, in characters
    "fineweb.short_line_characters": QualityThreshold(30, False),
    # share of the characters of lines in repeats
    "fineweb.max_duplicate_line_characters": QualityThreshold(0.01),
    "fineweb.max_newlines": QualityThreshold(0.3),  # newlines ÷ words
}


def find_family(name: str) -> str:
    """Return the family of a threshold."""
    return name.partition(".")[0]


def find_figure(name: str) -> str:
    """Return the name of the figure that a rule compares."""
    return name.partition(".")[2].partition("_")[2]


def parse_families(text: str) -> list[str]:
    """Return the families in a value of --quality, such as `gopher,c4`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _require_name(name, FAMILIES, "family of quality rules")
    return names


def parse_settings(text: str) -> list[str]:
    """Return the settings in a value of --quality-set, such as `c4.phrases=off`."""
    settings = [setting.strip() for setting in text.split(",")]
    for setting in settings:
        read_setting(setting)
    return settings


def read_setting(setting: str) -> tuple[str, float | None]:
    """Return the name and the value of a setting, None for `off`. Raises ArgumentTypeError."""
    name, _, value = setting.partition("=")
    _require_name(name, THRESHOLDS, "threshold")
    if value == OFF:
        return name, None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(
            f"expected NAME=NUMBER or NAME={OFF}, got {setting!r}; the default is "
            f"{name}={THRESHOLDS[name].default:g}"
        )
    return name, number


def group_settings(settings: Collection[str]) -> dict[str, list[str]]:
    """Return the distinct values of each threshold in some settings, as text."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        name, value = read_setting(setting)
        text = OFF if value is None else f"{value:.10g}"
        texts = values.setdefault(name, [])
        texts += [text] if text not in texts else []
    return values


def _require_name(name: str, known: Collection[str], kind: str) -> None:
    """Raise ArgumentTypeError with the nearest name if a name is unknown."""
    if name in known:
        return
    nearest = [
        name_known for name_known in known if name_known.endswith(f".{name}")
    ]  # the family was left out
    nearest += difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
    raise argparse.ArgumentTypeError(
        f"there is no {kind} {name!r}; "
        + (f"the nearest is {nearest[0]}" if nearest else f"expected one of {', '.join(known)}")
    )


def find_limits(families: Collection[str], settings: Collection[str]) -> dict[str, float | None]:
    """Return the thresholds in force by name, None for one that is off.

    families, settings: values of --quality and --quality-set.
    """
    limits: dict[str, float | None] = {
        name: threshold.default
        for name, threshold in THRESHOLDS.items()
        if find_family(name) in families
    }
    if C4 in families and FINEWEB in families:  # FineWeb uses C4's rules without this one
        limits[END_MARKS] = 0
    for setting in settings:
        name, value = read_setting(setting)
        if find_family(name) in families:
            limits[name] = value
    return limits


def find_line_limits(limits: Mapping[str, float | None], family: str) -> dict[str, float]:
    """Return the thresholds of lines of a family, without its name, as numbers."""
    values: dict[str, float] = {}
    for name, limit in limits.items():
        threshold = THRESHOLDS[name]
        if find_family(name) == family and not threshold.is_rule:
            values[name.partition(".")[2]] = threshold.off if limit is None else limit
    return values


def list_rules(limits: Mapping[str, float | None]) -> list[str]:
    """Return the names of the rules that are on, in the order of application."""
    return [
        name for name, limit in limits.items() if limit is not None and THRESHOLDS[name].is_rule
    ]


def describe_limits(limits: Mapping[str, float | None]) -> dict[str, str]:
    """Return the thresholds in force by family, for the plan."""
    lines: dict[str, str] = {}
    for name, limit in limits.items():
        family = find_family(name)
        value = OFF if limit is None else f"{limit:.10g}"
        text = f"{name.partition('.')[2]} {value}"
        lines[family] = f"{lines[family]}, {text}" if family in lines else text
    return lines
