"""Replace personal data in the rows that are left: `--mask`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import units
from lib.core.declared import option
from lib.core.errors import UsageError
from lib.curate.masks import choices, matches, phones, row_masker
from lib.curate.masks.choices import HASH, KINDS, PHONE
from lib.curate.masks.masker import Masker
from lib.curate.reader import list_sources
from lib.curate.step import Counts, CurationStep, Section

if TYPE_CHECKING:
    import pyarrow as pa

    from lib.curate.reader import SourceDataset

_VERSION = 2  # of the patterns
_FEWEST_KEY_BYTES = 16
_DIGEST_BYTES = 8
_NEW_KEY = "a new key: head -c 32 /dev/urandom > mask.key"
_NAMED = 5  # sources in the printed summary, and of each kind in the report


@dataclass(frozen=True)
class MaskOptions:
    """Declares the options of masks."""

    mask: list[str] = option(
        [],
        group="masks",
        parse=choices.parse_kinds,
        action="extend",
        metavar="KIND,…",
        help="replace personal data in the text: email, ip, phone, iban, card. All other steps "
        "see the text before it is masked (default: nothing)",
    )
    mask_phone_country: list[str] = option(
        [],
        parse=choices.parse_countries,
        action="extend",
        metavar="US,DE",
        help="with --mask phone, also mask numbers in the national format of these countries, "
        "which have the code 1 or numbers that begin with 0 (default: only numbers with + and a "
        "country code)",
    )
    mask_with: str = option(
        choices.CONSTANT,
        choices=choices.REPLACEMENTS,
        help="constant: all e-mail addresses become <email>, and so on; hash: equal addresses "
        "become the same <email:…> (needs --mask-key)",
    )
    mask_key: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="file with a secret of at least 16 bytes for --mask-with hash (default: none)",
    )


@dataclass
class Masks(CurationStep):
    """Replaces personal data in the second pass. scratch: directory for large texts."""

    chosen: MaskOptions
    scratch: Path | None = None

    name = "masks"
    options = MaskOptions

    @classmethod
    def from_options(cls, chosen: MaskOptions) -> Masks | None:
        """Return the step, None without --mask. Raises UsageError for contradictory options."""
        _require_consistent(chosen)
        return cls(chosen) if chosen.mask else None

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of matches to replace, in their usual order."""
        return [kind for kind in KINDS if kind in self.chosen.mask]

    def identify(self) -> dict[str, Any]:
        """Return the options, with a digest of the key instead of its path."""
        key = self.chosen.mask_key
        content = key.read_bytes() if key else b""
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=b"mask key")
        return {
            "mask": self.kinds,
            "mask_phone_country": sorted(self.chosen.mask_phone_country),
            "mask_with": self.chosen.mask_with,
            "mask_key": digest.hexdigest() if key else None,
        }

    def identify_first_pass(self) -> dict[str, Any]:
        """Return nothing, since rows are masked in the second pass."""
        return {}

    def list_versions(self) -> dict[str, Any]:
        """Return the versions of what finds matches."""
        package = {"phonenumbers": phones.identify_package()} if PHONE in self.kinds else {}
        return {"masks": _VERSION, **package}

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about masks."""
        countries = ", ".join(sorted(self.chosen.mask_phone_country))
        replacement = (
            f"a keyed hash, such as <{self.kinds[0]}:…>"
            if self.chosen.mask_with == HASH
            else f"constants, such as <{self.kinds[0]}>"
        )
        national = f", also in the national format of {countries}" if countries else ""
        return {"masks": f"{', '.join(self.kinds)}{national}; replaced by {replacement}"}

    def prepare(self, source: SourceDataset, work: Path, progress: bool) -> None:
        """Remember the directory for large texts."""
        self.scratch = work

    def start_rewriting(self) -> MaskedRows:
        """Return what masks rows."""
        key = self.chosen.mask_key
        masker = Masker(
            self.kinds, self.chosen.mask_phone_country, key.read_bytes() if key else b""
        )
        return MaskedRows(masker, self.scratch)

    def add_counts(self, total: Counts, more: Counts) -> Counts:
        """Return the matches by source and kind, and a few shapes; see `matches.add_counts`."""
        return matches.add_counts(total, more)

    def summarize(self, counts: Counts) -> dict[str, Any]:
        """Return the matches by kind and by source, and their shapes."""
        return {"masks": {"counts": matches.sum_kinds(counts), **matches.add_counts({}, counts)}}

    def list_sections(self, counts: Counts) -> Iterator[Section]:
        """Yield a table of the matches by kind."""
        rows = []
        for kind, number in matches.sum_kinds(counts).items():
            sources = [*matches.rank_sources(counts, kind).items()][:_NAMED]
            most = ", ".join(f"{name} {found:,}" for name, found in sources)
            rows.append([kind, f"{number:,}", most, ", ".join(counts["shapes"].get(kind, ()))])
        note = (
            "Masked matches in the rows of the dataset. A shape shows the form of a match, not "
            "its content."
        )
        yield Section("Masks", note, ["kind", "matches", "most in", "shapes"], rows)

    def format_lines(self, counts: Counts) -> dict[str, str]:
        """Return the line of the summary with the matches by kind, and their main sources."""
        kinds = matches.sum_kinds(counts)
        if not kinds:
            return {"masked": "nothing found"}
        sources = [*matches.rank_sources(counts, *kinds).items()]
        named = ", ".join(f"{name} {number:,}" for name, number in sources[:_NAMED])
        more = len(sources) - _NAMED
        if more > 0:
            named += f" and {units.counted(more, 'more source')}"
        found = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        return {"masked": f"{found} (by source: {named})"}


class MaskedRows:
    """Masks rows in a worker process."""

    def __init__(self, masker: Masker, scratch: Path | None) -> None:
        self._masker = masker
        self._scratch = scratch

    def rewrite(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Counts]:
        """Return the rows with their matches replaced, and the counts of the matches."""
        masked, hits = row_masker.mask_rows(rows, self._masker, self._scratch)
        return masked, matches.count_matches(hits, list_sources(rows)) if hits.rows else {}

    def show(self, text: str) -> str:
        """Return a text with its matches replaced."""
        return self._masker.mask_text(text)


def _require_consistent(chosen: MaskOptions) -> None:
    """Raise UsageError if options of --mask contradict each other, or if the key is unusable."""
    key = chosen.mask_key
    if not chosen.mask:
        for text, is_given in (
            ("--mask-phone-country", bool(chosen.mask_phone_country)),
            ("--mask-with hash", chosen.mask_with == HASH),
            ("--mask-key", key is not None),
        ):
            if is_given:
                raise UsageError(
                    f"{text} needs --mask", expected=f"--mask {','.join(KINDS)}, or some of them"
                )
        return
    if chosen.mask_phone_country and PHONE not in chosen.mask:
        raise UsageError(
            "--mask-phone-country needs --mask phone",
            expected="phone among the kinds of --mask, or no --mask-phone-country",
        )
    if PHONE in chosen.mask:
        phones.require_countries(chosen.mask_phone_country)
    if (key is None) == (chosen.mask_with == HASH):
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
