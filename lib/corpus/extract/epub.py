"""Extract the text of an EPUB book in its reading order."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import NamedTuple

from lib.core import units
from lib.corpus.extract.archive import Archive
from lib.corpus.extract.extracted import (
    DAMAGED,
    ENCRYPTED,
    NO_TEXT,
    Extracted,
    Refusal,
    clean_text,
)
from lib.corpus.extract.html import decode_page
from lib.corpus.extract.markup import strip_tags
from lib.corpus.extract.xml_events import XmlHandler, parse_xml

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def extract_epub(data: bytes, fallback: str) -> Extracted:
    """Return the text of the chapters in the order of the book's spine.

    Chapters are separated by blank lines. The table of contents is left out. fallback: encoding of
    a chapter that declares none and is not UTF-8. Raises Refusal if the file yields no text.
    """
    archive = Archive(data)
    chapters = _list_chapters(archive)
    locked = _list_encrypted(archive)
    texts = []
    replaced = 0
    damage: list[Refusal] = []
    for name in chapters:
        if name in locked:
            raise Refusal(ENCRYPTED, "the chapters of the EPUB file are encrypted")
        try:
            page, count = decode_page(archive.read(name), fallback)
        except Refusal as refusal:
            if refusal.kind != DAMAGED:
                raise
            damage.append(refusal)
            continue
        texts.append(strip_tags(page))
        replaced += count
    if damage and not any(texts):
        raise damage[0]
    text = clean_text("\n\n".join(filter(None, texts)))
    if not text:
        raise Refusal(NO_TEXT, "the chapters of the EPUB file contain no text")
    lost = ""
    if damage:
        lost = (
            f"{units.counted(len(damage), 'chapter')} of {len(chapters):,} cannot be read: "
            f"{damage[0].message}"
        )
    return Extracted(text, replaced, lost)


class _Item(NamedTuple):
    """Describes a file of the book. name: its path in the archive."""

    name: str
    media_type: str
    properties: str


class _Container(XmlHandler):
    """Finds the package document, which lists the files of the book."""

    package = ""

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""
        if name == "rootfile" and not self.package:
            self.package = attributes.get("full-path", "")


class _Package(XmlHandler):
    """Collects the files of a book by their IDs, and the IDs in reading order."""

    def __init__(self, directory: str) -> None:
        self.items: dict[str, _Item] = {}
        self.spine: list[str] = []
        self._directory = directory

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""
        if name == "item":
            target = _unquote_reference(attributes.get("href", "").partition("#")[0])
            self.items[attributes.get("id", "")] = _Item(
                posixpath.normpath(posixpath.join(self._directory, target)),
                attributes.get("media-type", ""),
                attributes.get("properties", ""),
            )
        elif name == "itemref":
            self.spine.append(attributes.get("idref", ""))


class _Encryption(XmlHandler):
    """Collects the names of encrypted files, which may be only the fonts of a readable book."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""
        if name == "CipherReference":
            self.names.add(_unquote_reference(attributes.get("URI", "")))


def _unquote_reference(reference: str) -> str:
    """Return a reference with `%20` and other escapes replaced by their characters."""
    data = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), reference.encode())
    return data.decode("utf-8", "replace")


def _list_chapters(archive: Archive) -> list[str]:
    """Return the names of the chapters in reading order, each once."""
    container = _Container()
    parse_xml(archive.read(_CONTAINER), _CONTAINER, container)
    if container.package not in archive:
        raise Refusal(DAMAGED, "the EPUB file has no package document")
    package = _Package(posixpath.dirname(container.package))
    parse_xml(archive.read(container.package), container.package, package)
    items = [package.items[key] for key in package.spine if key in package.items]
    names = [
        item.name
        for item in items
        if item.media_type in _PAGES and "nav" not in item.properties.split()
    ]
    if not names:
        raise Refusal(DAMAGED, "the EPUB file has no chapters in its spine")
    return list(dict.fromkeys(names))


def _list_encrypted(archive: Archive) -> set[str]:
    """Return the names of the files that cannot be read without a key."""
    encryption = _Encryption()
    if _ENCRYPTION in archive:
        parse_xml(archive.read(_ENCRYPTION), _ENCRYPTION, encryption)
    return encryption.names
