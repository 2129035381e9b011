"""Find numbers of bank accounts (IBAN) and of payment cards, by their check digits."""

from __future__ import annotations

import re

from lib.curate.masks.finders import Finder, is_bounded, is_letter_after

# Country → characters of an IBAN, by the registry of SWIFT.
_IBAN_LENGTHS = {
    country: int(size)
    for size, countries in (
        line.split(":")
        for line in (
            "15:NO",
            "16:BE",
            "18:DK FI FK FO GL NL SD",
            "19:MK SI",
            "20:AT BA EE KZ LT LU MN XK",
            "21:CH HR LI LV",
            "22:BG BH CR DE GB GE IE ME RS VA",
            "23:AE GI IL IQ OM SO TL",
            "24:AD CZ ES MD PK RO SA SE SK TN VG",
            "25:LY PT ST",
            "26:IS TR",
            "27:BI DJ FR GR IT MC MR SM",
            "28:AL AZ BY CY DO GT HN HU LB NI PL SV",
            "29:BR EG PS QA UA",
            "30:JO KW MU",
            "31:MT SC",
            "32:LC",
            "33:RU",
        )
    )
    for country in countries.split()
}
_IBAN = re.compile(rb"[A-Z]{2}[0-9]{2}(?:(?:[ -]|\xc2\xa0)?[A-Z0-9])+")
_IBAN_SEPARATORS = re.compile(rb"[ -]|\xc2\xa0")
_LONGEST_IBAN = 3 * 34  # bytes, with separators

# Digits in one piece, or in the groups that are printed on cards, with equal separators.
_CARD = re.compile(
    rb"[0-9]{4}(?:([ -])(?:[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?|[0-9]{6}\1[0-9]{4,5})"
    rb"|[0-9]{10,15})(?![0-9])"
)
# First digits of the schemes, and the lengths of their numbers.
_SCHEMES = re.compile(
    "4.{15}(?:.{3})?"  # Visa
    "|(?:5[1-5]|222[1-9]|22[3-9].|2[3-6]..|27[01].|2720).*(?<=^.{16})"  # Mastercard
    "|3[47].{13}"  # American Express
    "|(?:6011|64[4-9]|65).*(?<=^.{16})"  # Discover
    "|(?:30[0-5]|309|36|38|39).*(?<=^.{14})"  # Diners Club
    "|35(?:2[89]|[3-8].).{12}"  # JCB
    "|62.{14}(?:.{3})?"  # UnionPay
    "|(?:50|5[6-8]|63|67).{14}(?:.{3})?"  # Maestro
    "|220[0-4].{12}",  # Mir
)
# A group of four digits after a match, which shows that the match is a part of a longer number.
_GROUP_AFTER = re.compile(rb"[0-9]{4}(?![0-9A-Za-z])")
_GROUP_BEFORE = re.compile(rb"(?<![0-9A-Za-z])[0-9]{4}\Z")
_GROUP_BYTES = 6  # length of a separator, four digits and the character before them
_LONGEST_UNBROKEN = 16  # longer numbers in one piece are mostly identifiers


def find_iban(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the IBAN at an index, None if there is none.

    low, high: start and end of the line, as for all finders.
    """
    size = _IBAN_LENGTHS.get(text[at : at + 2].decode("ascii", "ignore"))
    match = _IBAN.match(text, at, min(high, at + _LONGEST_IBAN)) if size else None
    if not match or not size:
        return None
    end = _skip_characters(text, at, match.end(), size)
    if end is None or not is_bounded(text, at, end, low, high):
        return None
    number = _IBAN_SEPARATORS.sub(b"", text[at:end]).decode()
    digits = "".join(str(int(character, 36)) for character in number[4:] + number[:4])
    return (at, end) if int(digits) % 97 == 1 else None


def _skip_characters(text: bytes, start: int, end: int, count: int) -> int | None:
    """Return the index after `count` letters and digits, None if there are fewer."""
    for index in range(start, end):
        count -= text[index] not in b" -\xc2\xa0"
        if not count:
            return index + 1
    return None


def find_card(text: bytes, at: int, low: int, high: int) -> tuple[int, int] | None:
    """Return start and end of the card number that begins at an index, None if there is none."""
    match = _CARD.match(text, at, high)
    if not match or not is_bounded(text, at, match.end(), low, high):
        return None
    end = match.end()
    separator = match.group(1) or b""
    if _continues(text, at, end, low, high, separator):
        return None
    digits = match.group().decode().replace(separator.decode() or " ", "")
    if not separator and len(digits) > _LONGEST_UNBROKEN:
        return None
    return (at, end) if _SCHEMES.fullmatch(digits) and _has_luhn_digit(digits) else None


def _continues(text: bytes, start: int, end: int, low: int, high: int, separator: bytes) -> bool:
    """Return whether groups beside the digits belong to a longer number, such as a UUID."""
    if text[end : end + 1] == b"-" and is_letter_after(text, end + 1, high):
        return True
    if start > low and text[start - 1] in b"-+":
        return True
    if not separator:
        return False
    if text[end : end + 1] == separator and _GROUP_AFTER.match(text, end + 1, high):
        return True
    before = text[max(low, start - _GROUP_BYTES) : start]
    return before[-1:] == separator and bool(_GROUP_BEFORE.search(before[:-1]))


def _has_luhn_digit(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others, by Luhn."""
    total = sum(map(int, digits[::-2]))
    total += sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return total % 10 == 0 and len({*digits}) > 1


IBAN_FINDERS = (Finder(re.compile(rb"A(?<![Aa0_.]A)(?=A00)"), True, find_iban),)
CARD_FINDERS = (Finder(re.compile(rb"0(?<![Aa0_.]0)(?=000(?:[ -]0000|0{10}))"), True, find_card),)
