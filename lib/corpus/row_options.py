"""Declare the options of stage 02 that decide which rows a dataset has.

Stage 02 parses `RowOptions` from the command line and passes it to its workers. To add an option,
add a field to it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from lib.core import options
from lib.core.declared import option
from lib.corpus import encoding

TRAIN = "train"
VALIDATION = "validation"
TEXT, CHAT = FORMATS = "text", "chat"  # formats of a dataset


def parse_field_names(text: str) -> list[str]:
    """Return the names in a value of --fields, such as `text,meta.title`."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return names


@dataclass(frozen=True)
class RowOptions:
    """Contain the options that determine how documents become rows, and which rows are kept."""

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
        parse=parse_field_names,
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
    dedup: str = option(
        "none",
        choices=("none", "exact"),
        help="exact: drop rows that repeat the text of an earlier row (for conversations, its "
        "turns and tools); takes about 25 bytes of memory per row",
    )
    validation_percent: float = option(
        0.0,
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
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits of the dataset."""
        return (TRAIN, VALIDATION) if self.validation_percent else (TRAIN,)
