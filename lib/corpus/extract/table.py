"""The kinds of files whose text can be extracted: their packages, versions and extractors."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lib.core import commands
from lib.core.errors import Problems
from lib.corpus.extract.extracted import Extracted

Extract = Callable[[bytes, str], Extracted]


class Extractor(NamedTuple):
    """How files of a kind become text.

    label: name of the kind in messages. function: `module:function` below lib/corpus/extract; it
    takes the bytes of a file and the fallback encoding, and returns the text or raises Refusal.
    version: to be raised if our code gives other text for the same file. package: of
    requirements-optional.txt, "" if none is needed.
    """

    label: str
    function: str
    version: int
    package: str = ""


# To add a kind, add a row, and recognise it in `kinds.sniff_document`.
EXTRACTORS: dict[str, Extractor] = {
    "html": Extractor("HTML", "html:extract_html", 1, "resiliparse"),
    "pdf": Extractor("PDF", "pdf:extract_pdf", 1, "pypdfium2"),
    "docx": Extractor("DOCX", "docx:extract_docx", 1),
    "epub": Extractor("EPUB", "epub:extract_epub", 1),
}


def parse_kinds(text: str) -> list[str]:
    """Return the kinds in a value of --extract, in the order of the table."""
    names = [name.strip() for name in text.lower().split(",")]
    if unknown := [name for name in names if name not in EXTRACTORS]:
        raise argparse.ArgumentTypeError(
            f"expected kinds such as {','.join(EXTRACTORS)}, got {unknown[0]!r}"
        )
    return [kind for kind in EXTRACTORS if kind in names]


def load_extractor(kind: str) -> Extract:
    """Return the function that extracts the text of a kind of file."""
    module, _, name = EXTRACTORS[kind].function.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def require_packages(extracted: Sequence[str]) -> None:
    """Raise UsageError if a package that --extract needs is not installed.

    extracted: the kinds in --extract.
    """
    problems = Problems()
    for kind in extracted:
        package = EXTRACTORS[kind].package
        if package and not find_version(package):
            problems.add(
                f"--extract {kind} needs the package {package}, which is not installed",
                hint="a bundle that `airgap.py pack --optional` made has its "
                "wheels; or with an index in reach:",
                run=commands.pip_install_optional(package),
            )
    problems.raise_if_any()


def identify_extractors(extracted: Sequence[str]) -> dict[str, str]:
    """Return the versions that determine the extracted text, by kind.

    extracted: the kinds in --extract.
    """
    versions = {}
    for kind in extracted:
        _, _, version, package = EXTRACTORS[kind]
        versions[kind] = (
            f"{version}, {package} {find_version(package)}" if package else f"{version}"
        )
    return versions


def find_version(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
