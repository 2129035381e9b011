"""Name the values of the options of --mask, and parse them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lib.corpus.masks.phones import COUNTRIES

KINDS = EMAIL, IP, PHONE, IBAN, CARD = "email", "ip", "phone", "iban", "card"
CONSTANT, HASH = REPLACEMENTS = "constant", "hash"


def parse_kinds(text: str) -> list[str]:
    """Return the kinds in a value of --mask, such as `email,ip`."""
    return _parse_names(text, KINDS, "kinds")


def parse_countries(text: str) -> list[str]:
    """Return the countries in a value of --mask-phone-country, such as `US,DE`."""
    return _parse_names(text.upper(), COUNTRIES, "countries")


def _parse_names(text: str, known: Sequence[str], noun: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"expected {noun} among {','.join(known)}, got {','.join(unknown)!r}"
        )
    return names
