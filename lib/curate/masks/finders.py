"""Describe how matches of one kind are found: first a rare byte, then a pattern at that place.

Each line of a text is searched alone. No match crosses a newline, and no word on another line
decides about a match. So the lines of a text may be masked in any grouping, with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

# In the shape of a text, each digit is 0, each capital letter A, and each other letter a. Bytes
# beyond ASCII count as letters here; `is_letter_before` and `is_letter_after` decode them.
_LETTERS = bytes(byte for byte in range(256) if byte > 127 or chr(byte).islower())
_CAPITALS = bytes(range(ord("A"), ord("Z") + 1))
_DIGITS = b"0123456789"
SHAPE = bytes.maketrans(
    _LETTERS + _CAPITALS + _DIGITS, b"a" * len(_LETTERS) + b"A" * len(_CAPITALS) + b"0" * 10
)
# Scripts that are written without spaces: a character beside a match is no part of a longer word.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f"
    "\uff00-\uffef\U00020000-\U0003ffff"
)
LETTER = f"[^\\W{UNSPACED}]"  # matches digits and the underscore as well
_IS_LETTER = re.compile(LETTER)
_LONGEST_CHARACTER = 4  # bytes


class Finder(NamedTuple):
    """Describes one way to find a kind of match.

    anchor: pattern of the places to examine. It begins with a rare byte, or with several literal
    ones, for which `re` is fast. Two of its matches cannot overlap, so no place is skipped.
    uses_shape: whether to search the shape of the text instead of the text. find: called with the
    text, the index of the place, and the start and end of its line; returns the start and end of
    the match, None if there is none. reach: bytes before and after the place that may affect the
    match.
    """

    anchor: re.Pattern[bytes]
    uses_shape: bool
    find: Callable[[bytes, int, int, int], tuple[int, int] | None]
    reach: int = 2048


def is_letter_before(text: bytes, start: int, low: int) -> bool:
    """Return whether a letter, digit or underscore precedes an index. low: start of the line."""
    if start <= low:
        return False
    if text[start - 1] < 128:
        return text[start - 1 : start].isalnum() or text[start - 1] == ord("_")
    before = text[max(low, start - _LONGEST_CHARACTER) : start].decode(errors="ignore")
    return bool(_IS_LETTER.match(before[-1:]))


def is_letter_after(text: bytes, end: int, high: int) -> bool:
    """Return whether a letter, digit or underscore is at an index. high: end of the line."""
    if end >= high:
        return False
    if text[end] < 128:
        return text[end : end + 1].isalnum() or text[end] == ord("_")
    after = text[end : min(high, end + _LONGEST_CHARACTER)].decode(errors="ignore")
    return bool(_IS_LETTER.match(after[:1]))


def is_bounded(text: bytes, start: int, end: int, low: int, high: int) -> bool:
    """Return whether no letter, digit or dot of a longer number adjoins a match.

    A dot after the match may end a sentence, so it counts only before a letter or digit.
    """
    if is_letter_before(text, start, low) or is_letter_after(text, end, high):
        return False
    if start > low and text[start - 1] == ord("."):
        return False
    return not (end < high and text[end] == ord(".") and is_letter_after(text, end + 1, high))
