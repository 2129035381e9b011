"""Find telephone numbers: with + and a country code, or in the national format of a country.

Patterns find digits that are written like a number, and the package phonenumbers says whether the
numbering plan of the country contains this number. The package is optional, and imported only here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import lru_cache, partial

from lib.core import commands
from lib.core.errors import UsageError
from lib.curate.masks.finders import Finder, is_bounded, is_letter_after, is_letter_before

_PACKAGE = "phonenumberslite"
_FEWEST_DIGITS = 8
# Upper bounds on the bytes that the patterns below match, with and without a country code.
_LONGEST = 256
_LONGEST_NATIONAL = 128
_MOST_DIGITS = 15  # the most digits that E.164 allows
_KEPT_NUMBERS = 1 << 12  # a number is examined again after each replacement near it
# Groups of digits with single separators; a space or a hyphen may be one of Unicode's.
_SEPARATOR = rb"(?:[ ./-]|\xc2\xa0|\xe2\x80[\x91\x93\xaf])"
_AREA = _SEPARATOR + rb"?\([0-9]{1,5}\)" + _SEPARATOR + rb"?[0-9]{1,14}"
_GROUPS = rb"(?:" + _AREA + rb")?(?:" + _SEPARATOR + rb"[0-9]{1,14}){0,7}"
_INTERNATIONAL = re.compile(rb"\+[1-9][0-9]{0,14}" + _GROUPS)
_CODE_IN_BRACKETS = re.compile(rb"\(\+[1-9][0-9]{0,2}\)(?:[0-9]{1,14})?" + _GROUPS)
# Within the country: the area code, a wider gap such as ` / `, and groups.
_REST = rb"[0-9]{1,10}(?:" + _SEPARATOR + rb"[0-9]{1,8}){0,5}"
_GAP = rb"(?: ?(?:[/-]|\xe2\x80\x93) ?|" + _SEPARATOR + rb")"
_NATIONAL = re.compile(
    rb"(?:\(0 ?[0-9]{1,5}\)|0 ?\([0-9]{1,5}\))" + _GAP + rb"?" + _REST + rb"|0[0-9]{1,5}"
    rb"(?:" + _GAP + _REST + rb"| ?\([0-9]{1,4}\)" + _SEPARATOR + rb"?[0-9]{4})"
)
_AMERICAN = re.compile(
    rb"(?:1" + _SEPARATOR + rb"?)?"
    rb"(?:\([2-9][0-9]{2}\)" + _SEPARATOR + rb"?|[2-9][0-9]{2}" + _SEPARATOR + rb")"
    rb"[2-9][0-9]{2}" + _SEPARATOR + rb"[0-9]{4}\Z"
)
_LONGEST_AMERICAN = len("1 (212) 555-1234") + 3 * len("\u2011".encode())
# Digits in one piece are mostly no telephone number, except after one of these words.
_NATIONAL_PIECE = re.compile(rb"0[0-9]{8,13}")
_AMERICAN_PIECE = re.compile(rb"1?[2-9][0-9]{2}[2-9][0-9]{6}")
_WORDS = (
    "t(?:e|é|É)l(?:(?:e|é|É)?(?:phone|ph|fone?|foon|fono|fax|copie))?|phone|ph|fon|fax"
    "|mob(?:ile|il|iel|iltelefon)?|cell(?:ulare|phone)?|handy|portable|natel|gsm|sms|whatsapp"
    "|call|contact|hotline|電話|携帯|电话|手机|전화|тел|Тел|ТЕЛ"
)
_WORD_BEFORE = re.compile(
    rb"(?:(?<![A-Za-z\x80-\xff])|(?<=_))(?:" + _WORDS.encode() + rb")"
    rb"(?:[ ._-]?(?:number|numero|nummer|num|no|nr))?[ \t.:;,#=\"'/)-]{0,6}\Z",
    re.IGNORECASE,
)
_WORD_BYTES = 40  # before a number to search for such a word
# Another pair of digits beside pairs, which are then a list or a dump and no telephone number.
_PAIR_AFTER = re.compile(rb" [0-9]{2}(?![0-9])")
_PAIR_BEFORE = re.compile(rb"(?:\A|[^0-9A-Za-z./:-])[0-9]{2} \Z")
_PAIR_BYTES = len(" 12 ")
_PAIRS = re.compile(rb"(?:[^0-9]*[0-9]{2}(?![0-9]))+")
_DATE = re.compile(
    rb"[0-9]{2}( ?[./-] ?| )[0-9]{2}\1(?:(?:19|20)[0-9]{2}(?![0-9])|[0-9]{2}(?:\Z|[ T][0-9]{2}\Z))"
)
_DECIMAL = re.compile(rb"\+[0-9]+\.[0-9]+")
_POSTAL_CODE = re.compile(rb"0[0-9]{4}-[0-9]{4}(?![0-9])")  # a US ZIP code, as in MA 02111-1307
_TRUNK = b"(0)"  # dialled within the country only
_NO_DIGITS = bytes({*range(256)} - {*b"0123456789"})
_DIGITS = re.compile(rb"[0-9]+")
_SEPARATION = re.compile(_SEPARATOR)


def find_international(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the number after a `+`, None if there is none.

    If there are too many digits, the last groups do not belong to the number.
    """
    if at > low and text[at - 1] in b")]+":  # a sum in code
        return None
    match = at > low and _CODE_IN_BRACKETS.match(text, at - 1, high)
    match = match or _INTERNATIONAL.match(text, at, high)
    start, end = match.span() if match else (at, at)
    while end > at + 1:
        if is_bounded(text, start, end, low, high) and _is_international(text[start:end]):
            return start, end
        end = _drop_group(text, start, end)
    return None


def _drop_group(text: bytes, start: int, end: int) -> int:
    """Return the end of a number without its last group of digits."""
    digits = b"0123456789"
    return start + len(text[start:end].rstrip(digits).rstrip(b" ./-()\xc2\xa0\xe2\x80\x91\x93\xaf"))


def _is_international(number: bytes) -> bool:
    return not _DECIMAL.fullmatch(number) and _is_assigned(b"+" + _read_digits(number), None)


def _read_digits(number: bytes) -> bytes:
    return number.replace(_TRUNK, b"").translate(None, _NO_DIGITS)


@lru_cache(_KEPT_NUMBERS)
def _is_assigned(number: bytes, country: str | None) -> bool:
    """Return whether a numbering plan contains a number.

    number: digits, after `+` if they begin with a country code. country: the country in whose
    national format other digits are.
    """
    import phonenumbers

    if not _FEWEST_DIGITS <= len(number.lstrip(b"+")) <= _MOST_DIGITS:
        return False
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number.decode(), country))
    except phonenumbers.NumberParseException:
        return False


def _find_national(
    countries: Sequence[str], text: bytes, at: int, low: int, high: int
) -> tuple[int, int] | None:
    """Return start and end of the number whose first 0 is at an index, None if there is none.

    Groups that follow the number, such as a postal code, do not belong to it.
    """
    start = at - (at > low and text[at - 1] == ord("("))
    match = _NATIONAL.match(text, start, high)
    if match:
        if _POSTAL_CODE.match(text, at, high) or _DATE.match(text[at : match.end()]):
            return None
        is_clear = _may_begin(text, start, low) and not _is_in_list(
            text, start, match.end(), low, high
        )
    else:
        match = _NATIONAL_PIECE.match(text, start, high)
        is_clear = False
    # The search for a word is slow, so it comes last.
    if not match or not (is_clear or _follows_word(text, start, low)):
        return None
    end = match.end()
    while end > start:
        if _may_end(text, end, high):
            number = text[start:end]
            homes = _list_homes(number, countries)
            if homes and (
                end == match.end()
                or _has_usual_groups(number, homes)
                or _follows_word(text, start, low)
            ):
                return start, end
        end = _drop_last_group(text, start, end)
    return _find_usual(countries, text, start, match.end(), low, high)


def _find_usual(
    countries: Sequence[str], text: bytes, start: int, end: int, low: int, high: int
) -> tuple[int, int] | None:
    """Return start and end of a number after a word that groups of the same size follow, or None.

    This is the part that is written in the groups that are usual in one of the countries.
    """
    if not _follows_word(text, start, low):
        return None
    while end > start:
        number = text[start:end]
        homes = _list_homes(number, countries)
        if homes and _has_usual_groups(number, homes) and _may_end(text, end, high):
            return start, end
        shorter = _drop_group(text, start, end)
        end = shorter if text[shorter : shorter + 1] == b" " else start
    return None


def _is_in_list(text: bytes, start: int, end: int, low: int, high: int) -> bool:
    """Return whether groups of two digits continue before or after an index, as in a table."""
    if not _PAIRS.fullmatch(text, start, end):
        return False
    return bool(_PAIR_AFTER.match(text, end, high)) or bool(
        _PAIR_BEFORE.search(text[max(low, start - _PAIR_BYTES) : start])
    )


def _drop_last_group(text: bytes, start: int, end: int) -> int:
    """Return the end of a number without its last group, or `start` if that leaves no number.

    A group of the same size, or one that is not separated by a space, continues the number.
    """
    shorter = _drop_group(text, start, end)
    groups = _DIGITS.findall(text, start, end)
    is_separate = len(groups) > 2 and len(groups[-1]) != len(groups[-2])
    return shorter if is_separate and text[shorter : shorter + 1] == b" " else start


def _list_homes(number: bytes, countries: Sequence[str]) -> list[str]:
    """Return those of the countries whose numbering plan contains a number."""
    if not _may_have_dots(number):
        return []
    digits = _read_digits(number)
    return [country for country in countries if _is_assigned(digits, country)]


def _has_usual_groups(number: bytes, countries: Sequence[str]) -> bool:
    """Return whether a number is written in the groups that are usual in one of the countries."""
    digits = _read_digits(number)
    groups = _DIGITS.findall(number)
    return any(groups == _list_groups(digits, country) for country in countries)


def _may_have_dots(number: bytes) -> bool:
    """Return whether a number whose first separator is a dot is no decimal, version or address."""
    if b"." not in number:
        return True
    groups = _DIGITS.findall(number)
    if not number[len(groups[0]) :].startswith(b"."):
        return True
    if number != b".".join(groups) or len(groups) < 3 or min(map(len, groups[1:])) < 2:
        return False
    is_amount_or_address = {*map(len, groups[1:])} == {3}
    return sum(map(len, groups)) > _FEWEST_DIGITS and not is_amount_or_address


@lru_cache(_KEPT_NUMBERS)
def _list_groups(digits: bytes, country: str) -> list[bytes]:
    """Return the groups in which a country writes a number."""
    import phonenumbers

    number = phonenumbers.parse(digits.decode(), country)
    written = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
    return _DIGITS.findall(written.encode())


def _follows_word(text: bytes, start: int, low: int) -> bool:
    """Return whether a word such as `Tel.:` or `"phone": "` precedes an index."""
    return bool(_WORD_BEFORE.search(text[max(low, start - _WORD_BYTES) : start]))


def _may_begin(text: bytes, start: int, low: int) -> bool:
    """Return whether a number may begin at an index, after no letter, digit, sign or dot.

    A colon, comma, slash or bracket counts as a part of the number only after a digit.
    """
    if start <= low:
        return True
    if is_letter_before(text, start, low) or text[start - 1] in b"+-.":
        return False
    return text[start - 1] not in b",:/)" or not text[max(low, start - 2) : start - 1].isdigit()


def _may_end(text: bytes, end: int, high: int) -> bool:
    """Return whether a number may end at an index, before no letter, digit, decimal or time."""
    if is_letter_after(text, end, high):
        return False
    is_time = text[end : end + 1] == b":" and text[end + 1 : min(high, end + 2)].isdigit()
    return not is_time and not (
        end < high and text[end] == ord(".") and is_letter_after(text, end + 1, high)
    )


def _find_american(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the US number whose last separator is at an index, or None."""
    if not (separation := _SEPARATION.match(text, at)):
        return None
    end = separation.end() + len("1234")
    start = max(low, at - _LONGEST_AMERICAN)
    while end <= high and (match := _AMERICAN.search(text, start, end)):
        start = match.start()
        if _is_american_number(text, start, end, low, high):
            return start, end
        start += 1
    return None


def _find_american_piece(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of a US number in one piece at an index, if it follows a word."""
    match = _AMERICAN_PIECE.match(text, at, high)
    if not match or not _follows_word(text, at, low):
        return None
    return match.span() if _is_american_number(text, at, match.end(), low, high) else None


def _is_american_number(text: bytes, start: int, end: int, low: int, high: int) -> bool:
    return (
        _may_end(text, end, high)
        and (_may_begin(text, start, low) or _follows_word(text, start, low))
        and _is_assigned(_read_digits(text[start:end]), "US")
    )


_INTERNATIONAL_FINDER = Finder(
    re.compile(rb"\+(?=[1-9][0-9 ./()\xc2\xe2-])"), False, find_international, _LONGEST
)


def identify_package() -> str:
    """Return the version of the package, since another one may know other numbers.

    Raises UsageError if it is not installed.
    """
    if importlib.util.find_spec("phonenumbers") is None:
        raise UsageError(
            f"--mask phone needs the package {_PACKAGE}, which is not installed",
            run=f"{commands.pip_install_optional(_PACKAGE)}\n{commands.as_typed()}",
        )
    import phonenumbers

    return phonenumbers.__version__


def require_countries(countries: Sequence[str]) -> None:
    """Raise UsageError if the package is not installed, or if a country has no national format.

    Numbers without a country code look like other numbers, except in North America and in countries
    whose national numbers begin with 0.
    """
    identify_package()
    if unknown := [name for name in countries if not _is_american(name) and not _uses_zero(name)]:
        raise UsageError(
            f"--mask-phone-country {','.join(unknown)}: no national numbers can be recognised",
            expected="two letters of a country whose national numbers begin with 0, such as DE, "
            "FR, GB or JP, or of a country with the country code 1, such as US or CA",
        )


def _is_american(country: str) -> bool:
    import phonenumbers

    return phonenumbers.country_code_for_region(country) == 1


def _uses_zero(country: str) -> bool:
    import phonenumbers

    return (phonenumbers.ndd_prefix_for_region(country, True) or "").startswith("0")


def list_finders(countries: Sequence[str]) -> tuple[Finder, ...]:
    """Return the finders of telephone numbers. countries: the countries with national formats."""
    finders = [_INTERNATIONAL_FINDER]
    others = [country for country in countries if not _is_american(country)]
    if len(others) < len(countries):
        finders += [
            Finder(re.compile(pattern), uses_shape, find, _LONGEST_NATIONAL)
            for pattern, uses_shape, find in (
                (rb"-0000(?<=000-0000)", True, _find_american),
                (rb"\.0000(?<=000\.0000)", True, _find_american),
                (rb" 0000(?<=000 0000)", True, _find_american),
                (rb"\xc2(?<=[0-9]\xc2)(?=\xa0[0-9]{4})", False, _find_american),
                (rb"\xe2(?<=[0-9]\xe2)(?=\x80[\x91\x93\xaf][0-9]{4})", False, _find_american),
                (rb"0000000000(?<![0Aa]0000000000)(?!00)", True, _find_american_piece),
            )
        ]
    if others:
        anchor = re.compile(
            rb"0(?<![0-9+]0)(?<![0-9][./,:-]0)(?=[0-9]{1,5}[ ./()\x80-\xff-]{1,6}[0-9]"
            rb"|[0-9]{8,13}(?![0-9])| [0-9]{2,4}\)| ?\([0-9])"
        )
        finders.append(Finder(anchor, False, partial(_find_national, others), _LONGEST_NATIONAL))
    return tuple(finders)
