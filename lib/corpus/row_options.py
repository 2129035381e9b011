"""Declare the options of stage 02 that decide which rows a dataset contains.

Stage 02 parses `RowOptions` from the command line and passes it to its workers. To add an option,
add a field to it.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from lib.core import options, unknown_options
from lib.core.data_names import TRAIN, VALIDATION
from lib.core.declared import option
from lib.core.errors import Problems
from lib.corpus import encoding
from lib.corpus.extract import table

TEXT, CHAT = FORMATS = "text", "chat"  # formats of a dataset
EXACT = "exact"
_NEAR = "near"


def parse_dedup(text: str) -> str:
    """Return a value of --dedup. Raises ArgumentTypeError for near duplicates."""
    if text == _NEAR:
        raise argparse.ArgumentTypeError(
            f"near is gone; {unknown_options.move_to_curate('--dedup near')}"
        )
    return text


@dataclass(frozen=True)
class RowOptions:
    """Declares the options that determine how documents become rows, and which rows are kept."""

    format: str = option(
        TEXT,
        group="rows",
        choices=FORMATS,
        quiet=True,
        help="`text`: one row of text per document; `chat`: one conversation per record "
        "(messages, prompt/completion, ShareGPT, alpaca) with separate turns",
    )
    fields: list[str] = option(
        [],
        parse=options.parse_names,
        action="extend",
        metavar="A,B.C",
        help="keep only these (dotted) keys of structured documents (default: every string)",
    )
    strings: str = option(
        "joined",
        choices=("joined", "rows"),
        help="join the strings of a document with newlines, or write a row per string",
    )
    min_chars: int = option(
        0,
        parse=options.count,
        help="drop rows with fewer characters (for a conversation, the sum over its turns)",
    )
    fallback_encoding: str | None = option(
        None,
        parse=encoding.parse_encoding_name,
        metavar="NAME",
        help="encoding, such as cp1252, for bytes that are neither UTF-8 nor UTF-16 (recognised by "
        "its byte order mark) (default: replace invalid bytes by U+FFFD)",
    )
    extract: list[str] = option(
        [],
        parse=table.parse_kinds,
        action="extend",
        metavar="KINDS",
        quiet=True,
        help="extract the text of these kinds of documents: html, pdf, docx, epub, separated by "
        "commas (default: none; HTML is read with its tags, and the others are skipped)",
    )
    extract_seconds: int = option(
        60,
        parse=options.positive_int,
        metavar="N",
        quiet=True,
        help="processor time in seconds that --extract may take for a file; a file that takes "
        "longer is skipped",
    )
    dedup: str = option(
        "none",
        parse=parse_dedup,
        choices=("none", EXACT),
        help="exact: drop rows that repeat the text of an earlier row (for conversations, its "
        "turns and tools); takes about 30 bytes of memory per row",
    )
    validation_percent: float = option(
        0.0,
        aliases=("validation_split_percentage",),
        parse=options.percent,
        metavar="P",
        help="percentage of the rows for a validation split, selected by a hash of their text "
        "(0: no validation split)",
    )
    keep_source: bool = option(
        False,
        help="add a column `source` with the relative path of the file (--format chat always "
        "includes it)",
    )

    @property
    def drops_duplicates(self) -> bool:
        """Return whether rows that equal an earlier one are dropped."""
        return self.dedup == EXACT

    @property
    def drops_rows(self) -> bool:
        """Return whether any row can be dropped."""
        return bool(self.min_chars) or self.drops_duplicates

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)

    def require_consistent(self) -> None:
        """Raise UsageError if options exclude each other, or have no effect without another one."""
        problems = Problems()
        rows_only = (("--fields", self.fields), ("--strings", self.strings == "rows"))
        for name, is_given in rows_only if self.format == CHAT else ():
            if is_given:
                problems.add(
                    f"{name} and --format chat exclude each other",
                    expected=f"no {name}, because a conversation is kept complete",
                )
        if not self.extract and self.extract_seconds != RowOptions.extract_seconds:
            problems.add(
                "--extract-seconds needs --extract", expected="--extract, or no --extract-seconds"
            )
        problems.raise_if_any()


@dataclass(frozen=True)
class InputRowOptions(RowOptions):
    """The options of rows, and what the names in the input add to them.

    has_validation: some files are named as validation data, so there is a split of this name.
    """

    has_validation: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.has_validation else super().splits
