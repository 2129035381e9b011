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
from lib.curate.masks.finders import Finder, is_bounded

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
_INTERNATIONAL = re.compile(
    rb"\+[1-9][0-9]{0,14}(?:" + _AREA + rb")?(?:" + _SEPARATOR + rb"[0-9]{1,14}){0,7}"
)
_NATIONAL = re.compile(
    rb"\(?0[0-9]{1,5}(?:\)[ /-]?|[ /-]|\xc2\xa0)[0-9]{1,10}(?:" + _SEPARATOR + rb"[0-9]{1,8}){0,5}"
)
_AMERICAN = re.compile(
    rb"(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .-])[2-9][0-9]{2}[ .-][0-9]{4}"
)
_DATE = re.compile(rb"[0-9]{2}([ ./-])[0-9]{2}\1(?:[0-9]{4}(?:[ ./-]|\Z)|[0-9]{2}\Z)")
_DECIMAL = re.compile(rb"\+[0-9]+\.[0-9]+")
_POSTAL_CODE = re.compile(rb"0[0-9]{4}-[0-9]{4}(?![0-9])")  # a US ZIP code, as in MA 02111-1307
_TRUNK = re.compile(rb"\(0\)")  # dialled within the country only
_NO_DIGIT = re.compile(rb"[^0-9]+")


def find_international(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the number after a `+`, None if there is none.

    If there are too many digits, the last groups do not belong to the number.
    """
    if at > low and text[at - 1] in b")]+":  # a sum in code
        return None
    match = _INTERNATIONAL.match(text, at, high)
    end = match.end() if match else at
    while end > at + 1:
        if is_bounded(text, at, end, low, high) and _is_international(text[at:end]):
            return at, end
        end = _drop_group(text, at, end)
    return None


def _drop_group(text: bytes, start: int, end: int) -> int:
    """Return the end of a number without its last group of digits."""
    digits = b"0123456789"
    return start + len(text[start:end].rstrip(digits).rstrip(b" ./-()\xc2\xa0\xe2\x80\x91\x93\xaf"))


def _is_international(number: bytes) -> bool:
    return not _DECIMAL.fullmatch(number) and _is_assigned(b"+" + _read_digits(number), None)


def _read_digits(number: bytes) -> bytes:
    return _NO_DIGIT.sub(b"", _TRUNK.sub(b"", number))


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
    """Return start and end of the number whose first 0 is at an index, None if there is none."""
    start = at - (at > low and text[at - 1] == ord("("))
    if start > low and text[start - 1] in b"+-/,:)":
        return None
    match = _NATIONAL.match(text, start, high)
    if not match or _POSTAL_CODE.match(text, at, high) or _DATE.match(text[at : match.end()]):
        return None
    if not is_bounded(text, start, match.end(), low, high):
        return None
    digits = _read_digits(match.group())
    is_assigned = any(_is_assigned(digits, country) for country in countries)
    return (start, match.end()) if is_assigned else None


def _find_american(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the US number whose last separator is at an index, or None."""
    for start in range(max(low, at - len("1 (212) 555")), at - len("212 555") + 1):
        match = _AMERICAN.match(text, start, high)
        if not match or match.end() != at + len("-1234"):
            continue
        is_part = start > low and text[start - 1] in b"+-/,:"
        if is_part or not is_bounded(text, start, match.end(), low, high):
            continue
        if _is_assigned(_read_digits(match.group()), "US"):
            return start, match.end()
    return None


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
            Finder(re.compile(pattern), True, _find_american, _LONGEST_NATIONAL)
            for pattern in (
                rb"-(?<=000-)(?=0000)",
                rb"\.(?<=000\.)(?=0000)",
                rb" (?<=000 )(?=0000)",
            )
        ]
    if others:
        anchor = re.compile(rb"0(?<![0-9A-Za-z./,:+-]0)(?=[0-9]{1,5}(?:[ )/-]|\xc2\xa0))")
        finders.append(Finder(anchor, False, partial(_find_national, others), _LONGEST_NATIONAL))
    return tuple(finders)
