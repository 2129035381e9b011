"""Read the options of --mask, and describe the masks in the identity of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lib.core import commands
from lib.core.errors import UsageError
from lib.corpus.row_options import RowOptions
from lib.curate.masks import phones
from lib.curate.masks.choices import HASH, KINDS, PHONE
from lib.curate.masks.masker import Masker

VERSION = 1  # version of the patterns, which the identity of a dataset contains
_FEWEST_KEY_BYTES = 16
_DIGEST_BYTES = 8
_NEW_KEY = "a new key: head -c 32 /dev/urandom > mask.key"


def make_masker(row_options: RowOptions) -> Masker:
    """Return the masker of a dataset; without --mask it replaces nothing."""
    kinds = tuple(kind for kind in KINDS if kind in row_options.mask)
    return _make_masker(kinds, tuple(row_options.mask_phone_country), row_options.mask_key)


@cache
def _make_masker(kinds: Sequence[str], countries: Sequence[str], key: Path | None) -> Masker:
    return Masker(kinds, countries, key.read_bytes() if key else b"")


def identify_masks(row_options: RowOptions) -> dict[str, Any]:
    """Return the entries of the masks in the identity of a dataset, {} without --mask.

    They contain a digest of the key and not the key itself.
    """
    if not row_options.mask:
        return {}
    key = row_options.mask_key
    content = key.read_bytes() if key else b""
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=b"mask key")
    return {
        "mask": [kind for kind in KINDS if kind in row_options.mask],
        "mask_phone_country": sorted({*row_options.mask_phone_country}),
        "mask_with": row_options.mask_with,
        "mask_key": digest.hexdigest() if key else None,
        **_identify_versions(row_options.mask),
    }


def _identify_versions(kinds: Sequence[str]) -> dict[str, Any]:
    """Return the versions of what finds matches, in the identity of a dataset."""
    package = {"mask_phonenumbers": phones.identify_package()} if PHONE in kinds else {}
    return {"mask_version": VERSION, **package}


def describe_masks(row_options: RowOptions) -> dict[str, str]:
    """Return the line of the plan about --mask by its label, {} without --mask."""
    if not row_options.mask:
        return {}
    masked = [kind for kind in KINDS if kind in row_options.mask]
    countries = ", ".join(sorted({*row_options.mask_phone_country}))
    replacement = (
        f"a keyed hash, such as <{masked[0]}:…>"
        if row_options.mask_with == HASH
        else f"constants, such as <{masked[0]}>"
    )
    national = f", also in the national format of {countries}" if countries else ""
    return {"masks": f"{', '.join(masked)}{national}; replaced by {replacement}"}


def require_masks(row_options: RowOptions) -> None:
    """Raise UsageError if options of --mask contradict each other, or if the key is unusable."""
    key = row_options.mask_key
    if not row_options.mask:
        for option, is_given in (
            ("--mask-phone-country", bool(row_options.mask_phone_country)),
            ("--mask-with hash", row_options.mask_with == HASH),
            ("--mask-key", key is not None),
        ):
            if is_given:
                raise UsageError(
                    f"{option} needs --mask", expected=f"--mask {','.join(KINDS)}, or some of them"
                )
        return
    if row_options.mask_phone_country and PHONE not in row_options.mask:
        raise UsageError(
            "--mask-phone-country needs --mask phone",
            expected="phone among the kinds of --mask, or no --mask-phone-country",
        )
    if PHONE in row_options.mask:
        phones.require_countries(row_options.mask_phone_country)
    if (key is None) == (row_options.mask_with == HASH):
        raise UsageError(
            "--mask-with hash and --mask-key need each other",
            expected="both or none, since a hash without a secret key can be reversed by guessing",
            hint=_NEW_KEY,
        )
    if key is not None:
        _require_key(key)


def _require_key(key: Path) -> None:
    try:
        size = len(key.read_bytes())
    except OSError as error:
        raise UsageError(f"--mask-key {key}: {error.strerror}", hint=_NEW_KEY) from None
    if size < _FEWEST_KEY_BYTES:
        raise UsageError(
            f"--mask-key {key} is too short",
            expected=f"at least {_FEWEST_KEY_BYTES} bytes that nobody can guess",
            found=f"{size} bytes",
            hint=_NEW_KEY,
        )


def are_masked(earlier: Sequence[Mapping[str, Any]], row_options: RowOptions) -> bool:
    """Return whether earlier datasets, whose options are given, contain masked text.

    Exact similarities compare the stored text, so all of it must be masked alike. Raises UsageError
    if some of the datasets are masked in another way than this one.
    """
    ours = identify_masks(row_options)
    masks = [
        {name: value for name, value in options.items() if name.startswith("mask")}
        for options in earlier
    ]
    theirs = [options for options in masks if options]
    if not theirs:
        return False
    if all(options == ours for options in masks):
        return True
    raise UsageError(
        "the datasets of --near-against were built with other masks",
        expected="the same --mask, --mask-phone-country, --mask-with and key for this dataset and "
        "all of them, or no --mask in all of them",
        found="\n".join(dict.fromkeys(map(_spell_masks, [ours, *masks]))),
        run=_format_remedy(theirs[0]) if masks == [theirs[0]] * len(masks) else "",
    )


def _format_remedy(masks: Mapping[str, Any]) -> str:
    """Return this command with the masks of an earlier dataset, "" if these need a key."""
    if masks["mask_key"] or not _identify_versions(masks["mask"]).items() <= masks.items():
        return ""
    countries = masks["mask_phone_country"]
    return commands.as_typed(
        *("--mask", ",".join(masks["mask"])),
        *(("--mask-phone-country", ",".join(countries)) if countries else ()),
        drop=["--mask", "--mask-phone-country", "--mask-with", "--mask-key"],
    )


def _spell_masks(masks: Mapping[str, Any]) -> str:
    """Return the options that produce the masks of a dataset, as typed."""
    if not masks:
        return "no --mask"
    countries = ",".join(masks["mask_phone_country"])
    words = ["--mask", ",".join(masks["mask"])]
    words += ["--mask-phone-country", countries] if countries else []
    words += ["--mask-with", HASH, "with key", masks["mask_key"]] if masks["mask_key"] else []
    package = masks.get("mask_phonenumbers")
    versions = f"version {masks['mask_version']}" + (f", phonenumbers {package}" if package else "")
    return " ".join(words) + f", {versions}"
