"""Name the values of the options of --mask, and parse them."""

from __future__ import annotations

import argparse

KINDS = EMAIL, IP, PHONE, IBAN, CARD = "email", "ip", "phone", "iban", "card"
CONSTANT, HASH = REPLACEMENTS = "constant", "hash"


def parse_kinds(text: str) -> list[str]:
    """Return the kinds in a value of --mask, such as `email,ip`."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(
            f"expected kinds among {','.join(KINDS)}, got {','.join(unknown)!r}"
        )
    return names


def parse_countries(text: str) -> list[str]:
    """Return the countries in a value of --mask-phone-country, such as `US,DE`."""
    return [name.strip().upper() for name in text.split(",")]
