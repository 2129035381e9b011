"""Find telephone numbers: with + and a country code, or in the national format of a country."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from lib.corpus.masks.finders import Finder, is_bounded

_FEWEST_DIGITS = 8
# Upper bounds on the bytes that the patterns below match, with and without a country code.
_LONGEST = 256
_LONGEST_NATIONAL = 128
_MOST_DIGITS = 15  # the most digits that E.164 allows
# Groups of digits with single separators; a space or a hyphen may be one of Unicode's.
_SEPARATOR = rb"(?:[ ./-]|\xc2\xa0|\xe2\x80[\x91\x93\xaf])"
_AREA = _SEPARATOR + rb"?\([0-9]{1,5}\)" + _SEPARATOR + rb"?[0-9]{1,14}"
_INTERNATIONAL = re.compile(
    rb"\+[1-9][0-9]{0,14}(?:" + _AREA + rb")?(?:" + _SEPARATOR + rb"[0-9]{1,14}){0,7}"
)
_NATIONAL = re.compile(
    rb"\(?0[0-9]{1,5}(?:\)[ /-]?|[ /-]|\xc2\xa0)[0-9]{1,8}(?:" + _SEPARATOR + rb"[0-9]{1,8}){0,5}"
)
_AMERICAN = re.compile(
    rb"(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .-])[2-9][0-9]{2}[ .-][0-9]{4}"
)
_DATE = re.compile(rb"[0-9]{2}([ ./-])[0-9]{2}\1[0-9]{2}(?:[0-9]{2})?(?:[ ./-]|\Z)")
_DECIMAL = re.compile(rb"\+[0-9]+\.[0-9]+")
_POSTAL_CODE = re.compile(rb"0[0-9]{4}-[0-9]{4}(?![0-9])")  # a US ZIP code, as in MA 02111-1307
_TRUNK = re.compile(rb"\(0\)")  # dialled within the country only
_NO_DIGIT = re.compile(rb"[^0-9]+")

# Country code → the fewest and the most digits after it. Other codes: any number of digits that
# E.164 allows.
_LENGTHS = {
    code: (fewest, most)
    for codes, fewest, most in (
        ("1 7 52 57 58 90 91", 10, 10),
        ("27 30 31 33 34 40 41 48 56 93 94 212 351 380", 9, 9),
        ("32 36 44 51 66 84 213", 8, 10),
        ("45 47 53 65 216", 8, 8),
        ("54 55 86", 10, 11),
        ("20 60 63 64 81 82 92 98 353", 7, 10),
        ("39 43 46 49 61 352", 6, 11),
        ("62", 8, 12),
    )
    for code in codes.split()
}
_CODES = (
    "95 211 218 220 221 222 223 224 225 226 227 228 229 230 231 232 233 234 235 236 237 238 239 "
    "240 241 242 243 244 245 246 247 248 249 250 251 252 253 254 255 256 257 258 260 261 262 263 "
    "264 265 266 267 268 269 290 291 297 298 299 350 354 355 356 357 358 359 370 371 372 373 374 "
    "375 376 377 378 381 382 383 385 386 387 389 420 421 423 500 501 502 503 504 505 506 507 508 "
    "509 590 591 592 593 594 595 596 597 598 599 670 672 673 674 675 676 677 678 679 680 681 682 "
    "683 685 686 687 688 689 690 691 692 800 808 850 852 853 855 856 870 878 880 881 882 883 886 "
    "888 960 961 962 963 964 965 966 967 968 970 971 972 973 974 975 976 977 979 992 993 994 995 "
    "996 998"
)
_OTHER_CODES = frozenset(_CODES.split())
# Country → the fewest and the most digits of a national number that begins with 0, with the 0.
_NATIONAL_LENGTHS = {
    "AT": (8, 12),
    "AU": (10, 10),
    "BE": (9, 10),
    "CH": (10, 10),
    "DE": (8, 12),
    "FR": (10, 10),
    "GB": (10, 11),
    "JP": (10, 11),
    "NL": (10, 10),
    "SE": (8, 10),
}
_AMERICAN_COUNTRIES = ("CA", "US")
COUNTRIES = tuple(sorted([*_AMERICAN_COUNTRIES, *_NATIONAL_LENGTHS]))


def find_international(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the number after a `+`, None if there is none.

    If there are too many digits, the last groups do not belong to the number.
    """
    if at > low and text[at - 1] in b")]+":  # a sum in code
        return None
    match = _INTERNATIONAL.match(text, at, high)
    end = match.end() if match else at
    while end > at + 1:
        if _is_international(text[at:end]) and is_bounded(text, at, end, low, high):
            return at, end
        end = _drop_group(text, at, end)
    return None


def _drop_group(text: bytes, start: int, end: int) -> int:
    """Return the end of a number without its last group of digits."""
    digits = b"0123456789"
    return start + len(text[start:end].rstrip(digits).rstrip(b" ./-()\xc2\xa0\xe2\x80\x91\x93\xaf"))


def _is_international(number: bytes) -> bool:
    digits = _NO_DIGIT.sub(b"", _TRUNK.sub(b"", number)).decode()
    if _DECIMAL.fullmatch(number):
        return False
    if not _FEWEST_DIGITS <= len(digits) <= _MOST_DIGITS:
        return False
    for size in (1, 2, 3):
        code = digits[:size]
        rest = len(digits) - size
        if code == "1" and not re.match("[2-9]..[2-9]", digits[1:]):
            return False
        if lengths := _LENGTHS.get(code):
            return lengths[0] <= rest <= lengths[1]
        if code in _OTHER_CODES:
            return True
    return False


def _find_national(
    lengths: Sequence[tuple[int, int]], text: bytes, at: int, low: int, high: int
) -> tuple[int, int] | None:
    """Return start and end of the number whose first 0 is at an index, None if there is none.

    lengths: the fewest and the most digits of such numbers, by country.
    """
    start = at - (at > low and text[at - 1] == ord("("))
    if start > low and text[start - 1] in b"+-/,:)":
        return None
    match = _NATIONAL.match(text, start, high)
    if _POSTAL_CODE.match(text, at, high):
        return None
    if not match or _DATE.match(text[at : match.end()]):
        return None
    size = len(_NO_DIGIT.sub(b"", match.group()))
    if not any(fewest <= size <= most for fewest, most in lengths):
        return None
    return (start, match.end()) if is_bounded(text, start, match.end(), low, high) else None


def _find_american(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the US number whose last separator is at an index, or None."""
    for start in range(max(low, at - len("1 (212) 555")), at - len("212 555") + 1):
        match = _AMERICAN.match(text, start, high)
        if not match or match.end() != at + len("-1234"):
            continue
        is_part = start > low and text[start - 1] in b"+-/,:"
        if not is_part and is_bounded(text, start, match.end(), low, high):
            return start, match.end()
    return None


_INTERNATIONAL_FINDER = Finder(
    re.compile(rb"\+(?=[1-9][0-9 ./()\xc2\xe2-])"), False, find_international, _LONGEST
)


def list_finders(countries: Sequence[str]) -> tuple[Finder, ...]:
    """Return the finders of telephone numbers. countries: the countries with national formats."""
    finders = [_INTERNATIONAL_FINDER]
    if any(country in _AMERICAN_COUNTRIES for country in countries):
        finders += [
            Finder(re.compile(pattern), True, _find_american, _LONGEST_NATIONAL)
            for pattern in (
                rb"-(?<=000-)(?=0000)",
                rb"\.(?<=000\.)(?=0000)",
                rb" (?<=000 )(?=0000)",
            )
        ]
    lengths = [_NATIONAL_LENGTHS[country] for country in countries if country in _NATIONAL_LENGTHS]
    if lengths:
        anchor = re.compile(rb"0(?<![0-9A-Za-z./,:+-]0)(?=[0-9]{1,5}(?:[ )/-]|\xc2\xa0))")
        finders.append(Finder(anchor, False, partial(_find_national, lengths), _LONGEST_NATIONAL))
    return tuple(finders)
