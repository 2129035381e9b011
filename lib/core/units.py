"""Format numbers and lists as text: bytes, counts, durations, the first of many names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_DAYS_ALONE = 10  # from so many days on, hours do not matter
_LONGEST = 48  # characters of a text within a line
_NEXT_UNIT = 999.5  # a number that rounds to 1000 is shown as 1 of the next unit


def ceil_div(count: int, parts: int) -> int:
    """Return a quotient rounded up. It is exact for integers of any size, unlike math.ceil."""
    return -(-count // parts)


def size(count: float) -> str:
    """Return a byte count in decimal units: 1_500_000 → `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < _NEXT_UNIT:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def memory(count: float) -> str:
    """Return bytes of memory in binary units: `61.2 GiB`, `23.4 MiB` below a tenth of a GiB."""
    if abs(gib := count / (1 << 30)) >= 0.1:
        return f"{gib:,.{2 if abs(gib) < 9.995 else 1}f} GiB"
    return f"{gib * 1024:.1f} MiB" if abs(gib) >= 0.1 / 1024 else f"{count / 1024:.1f} KiB"


def first_of(numbers: Iterable[int]) -> str:
    """Return sorted numbers as text, at most the first eight: `0, 1, 2, …`."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:8])) + (", …" if len(ordered) > 8 else "")


def join_lines(lines: Sequence[str], most: int) -> str:
    """Join at most `most` lines; a last line counts the rest: `… and 3 more`."""
    return "\n".join(
        [*lines[:most], *([f"… and {len(lines) - most} more"] if len(lines) > most else [])]
    )


def join_names(names: Sequence[str], most: int) -> str:
    """Join at most `most` names, and count the rest: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shorten_text(text: str) -> str:
    """Return a text, or its beginning if it is too long for a part of a line."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2] + " …"


def parse_size(text: str) -> int:
    """Return the bytes of `5GB` (decimal), `512MiB` (binary) or a plain number.

    Raises ValueError for any other text.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 5GB, 512MiB or 1000000")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def count(number: float) -> str:
    """Return a count in short form: 3_212_749_824 → `3.21B`."""
    for unit in ("", "K", "M", "B"):
        if abs(number) < _NEXT_UNIT:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def rate(number: float) -> str:
    """Return a rate with at least three digits: `12,346`, `12.3`, `0.0123`."""
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return a duration: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`, `237 days`."""
    if seconds < 0.05:
        return "under 0.1 s"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, secs = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {secs:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    if hours < 24 * _DAYS_ALONE:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{round(hours / 24):,} days"


def counted(number: int, noun: str) -> str:
    """Return a count of things: `1 file`, `2,034 files`."""
    return f"{number:,} {plural(number, noun)}"


def counted_are(number: int, noun: str) -> str:
    """Return the subject and the verb of a sentence: `1 row is`, `2,034 rows are`."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def plural(number: int, noun: str) -> str:
    """Return a noun as it follows a number: `file` after 1, `files` after others."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith(("s", "ch")) else "s")
