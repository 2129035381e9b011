"""List the kinds of files whose text can be extracted, with their extractors and packages."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Callable, Collection
from typing import NamedTuple

from lib.corpus.extract.extracted import Extracted

Extract = Callable[[bytes, str], Extracted]


class Extractor(NamedTuple):
    """Describes how files of a kind become text.

    label: name of the kind in messages. function: `module:function` below lib/corpus/extract; it
    takes the bytes of a file and the fallback encoding, and returns the text or raises Refusal.
    version: increase it when our code returns other text for the same file. packages: names in
    requirements-optional.txt.
    """

    label: str
    function: str
    version: int
    packages: tuple[str, ...]


# To add a kind, add a row, and recognise it in `kinds.sniff_document`.
EXTRACTORS: dict[str, Extractor] = {
    "html": Extractor("HTML", "html:extract_html", 2, ("resiliparse",)),
    "pdf": Extractor("PDF", "pdf:extract_pdf", 1, ("pypdfium2",)),
    "docx": Extractor("DOCX", "docx:extract_docx", 2, ("mammoth", "resiliparse")),
    "epub": Extractor("EPUB", "epub:extract_epub", 2, ("resiliparse",)),
}


def parse_kinds(text: str) -> list[str]:
    """Return the kinds in a value of --extract, in the order of the table."""
    names = [name.strip() for name in text.lower().split(",")]
    if unknown := [name for name in names if name not in EXTRACTORS]:
        raise argparse.ArgumentTypeError(
            f"expected kinds such as {','.join(EXTRACTORS)}, got {unknown[0]!r}"
        )
    return sort_kinds(names)


def sort_kinds(kinds: Collection[str]) -> list[str]:
    """Return kinds in the order of the table, each once."""
    return [kind for kind in EXTRACTORS if kind in kinds]


def load_extractor(kind: str) -> Extract:
    """Return the function that extracts the text of a kind of file."""
    module, _, name = EXTRACTORS[kind].function.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def find_version(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
