"""Extract the text of an EPUB book in its reading order."""

from __future__ import annotations

import html
import posixpath
import re
from typing import NamedTuple
from xml.etree import ElementTree

from lib.core import units
from lib.corpus.extract.archive import Archive, strip_namespace
from lib.corpus.extract.extracted import (
    DAMAGED,
    ENCRYPTED,
    NO_TEXT,
    Extracted,
    Refusal,
    clean_text,
)
from lib.corpus.extract.html import convert_page, decode_page

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_CONTENTS = "application/x-dtbncx+xml"  # a table of contents
# What XHTML writes in another way than HTML.
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_EMPTY_ELEMENT = re.compile(r"<([A-Za-z][\w.:-]*)((?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*)/>")
_VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source"),
    *("track", "wbr"),
}
_DRAWING = re.compile(r"<(/?)(?:svg|text)\b", re.IGNORECASE)


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
    for chapter in chapters:
        name = archive.find(chapter.name) or chapter.name
        if name in locked:
            raise Refusal(ENCRYPTED, "the chapters of the EPUB file are encrypted")
        try:
            _require_markup(chapter)
            page, count = decode_page(archive.read(name), fallback)
        except Refusal as refusal:
            if refusal.kind != DAMAGED:
                raise
            damage.append(refusal)
            continue
        texts.append(convert_page(_convert_markup(page)))
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


class _Chapter(NamedTuple):
    """Describes a file in the spine. name: its path in the archive. media_type: lower case."""

    name: str
    media_type: str


def _list_chapters(archive: Archive) -> list[_Chapter]:
    """Return the chapters in reading order, each once, without the table of contents."""
    container = archive.parse(_CONTAINER)
    package = next((archive.find(path) for path in _list_values(container, "full-path")), "")
    if not package:
        raise Refusal(DAMAGED, "the EPUB file has no package document")
    root = archive.parse(package)
    items = {
        element.get("id", ""): element for element in root.iter() if _is_named(element, "item")
    }
    chapters = []
    for key in _list_values(root, "idref"):
        item = items.get(key)
        if item is None:
            chapters.append(_Chapter(f"{key} (an item without a file)", ""))
            continue
        target = item.get("href", "").partition("#")[0]
        media_type = item.get("media-type", "").partition(";")[0].strip().lower()
        if "nav" not in item.get("properties", "").split() and media_type != _CONTENTS:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(package), target))
            chapters.append(_Chapter(path, media_type))
    if not chapters:
        raise Refusal(DAMAGED, "the EPUB file has no chapters in its spine")
    return list(dict.fromkeys(chapters))


def _list_encrypted(archive: Archive) -> set[str]:
    """Return the names of the files that cannot be read without a key.

    They may be only the fonts of a readable book.
    """
    if not archive.find(_ENCRYPTION):
        return set()
    return {archive.find(uri) for uri in _list_values(archive.parse(_ENCRYPTION), "URI")}


def _list_values(root: ElementTree.Element, attribute: str) -> list[str]:
    """Return the values of an attribute in all elements, in the order of the document."""
    return [element.attrib[attribute] for element in root.iter() if attribute in element.attrib]


def _is_named(element: ElementTree.Element, name: str) -> bool:
    return strip_namespace(element.tag) == name


def _require_markup(chapter: _Chapter) -> None:
    """Raise Refusal if a chapter is a picture, sound or the like."""
    kind = chapter.media_type
    is_markup = kind.endswith(("xml", "html")) or kind.startswith(("text/", "application/oebps"))
    if kind and not is_markup:
        raise Refusal(DAMAGED, f"{chapter.name!r} is {kind}, which has no text")


def _convert_markup(page: str) -> str:
    """Return a chapter as HTML, so that the parser of web pages loses no text of XHTML or SVG."""
    page = _CDATA.sub(lambda match: html.escape(match[1]), page)
    page = _EMPTY_ELEMENT.sub(_close_element, page)
    return _DRAWING.sub(r"<\1div", page)


def _close_element(match: re.Match[str]) -> str:
    """Return an element such as `<script/>` with an end tag, without which HTML leaves it open."""
    name, attributes = match.groups()
    return match[0] if name.lower() in _VOID else f"<{name}{attributes}></{name}>"
