"""Extract the text of a DOCX document: paragraphs, tables and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lib.corpus.extract.archive import Archive
from lib.corpus.extract.extracted import (
    DAMAGED,
    ENCRYPTED,
    NO_TEXT,
    Extracted,
    Refusal,
    clean_text,
)
from lib.corpus.extract.xml_events import XmlHandler, parse_xml

_OLE_MAGIC = b"\xd0\xcf\x11\xe0"  # Word stores a document with a password in such a container
_DOCUMENT = "word/document.xml"
_NOTES = ("footnotes", "endnotes")
# Elements without text to extract: deleted text, the old place of moved text, a second version of a
# drawing for old programs, and properties, in which `tab` is a tab stop.
_SKIPPED = {"del", "moveFrom", "Fallback", "pPrChange", "tabs"}
_BREAKS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def extract_docx(data: bytes, fallback: str) -> Extracted:
    """Return the text of a document, with its footnotes and endnotes at the end.

    Paragraphs are separated by blank lines, list items and rows of a table by line ends, and cells
    by tabs. Headers, footers and comments are left out. fallback: unused, since XML declares its
    encoding. Raises Refusal if the file yields no text.
    """
    if data.startswith(_OLE_MAGIC):
        raise Refusal(ENCRYPTED, "the DOCX file is encrypted, or it is a DOC file of Word 97")
    archive = Archive(data)
    main = _find_document(archive)
    body = _Body()
    parse_xml(archive.read(main), main, body)
    notes: list[str] = []
    for kind in _NOTES:
        name = f"{main.rpartition('/')[0]}/{kind}.xml".lstrip("/")
        if name in archive and any(mark.kind == kind for mark in body.marks):
            reader = _Body()
            parse_xml(archive.read(name), name, reader)
            notes += [
                f"[{number}] {reader.notes[mark.id]}"
                for number, mark in enumerate(body.marks, 1)
                if mark.kind == kind and mark.id in reader.notes
            ]
    text = clean_text("\n\n".join(filter(None, (body.join(), *notes))))
    if not text:
        raise Refusal(NO_TEXT, "the DOCX file contains no text")
    return Extracted(text)


class _Relationships(XmlHandler):
    """Finds the main document in the relationships of a package."""

    target = ""

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""
        if attributes.get("Type", "").endswith("/officeDocument"):
            self.target = attributes.get("Target", "").lstrip("/")


def _find_document(archive: Archive) -> str:
    """Return the name of the main document."""
    if "_rels/.rels" in archive:
        relationships = _Relationships()
        parse_xml(archive.read("_rels/.rels"), "_rels/.rels", relationships)
        if relationships.target in archive:
            return relationships.target
    if _DOCUMENT not in archive:
        raise Refusal(DAMAGED, f"the DOCX file has no {_DOCUMENT}")
    return _DOCUMENT


class _Mark(NamedTuple):
    """Describes a reference to a note. kind: `footnotes` or `endnotes`."""

    kind: str
    id: str


class _Block(NamedTuple):
    """Describes a paragraph or a table. is_item: whether it is an item of a list."""

    text: str
    is_item: bool = False


class _Body(XmlHandler):
    """Collects the blocks of a document or of its notes.

    marks: references to notes in the order of the text, which gives them their numbers. notes:
    texts of notes by ID, if this is the part with the notes.
    """

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self.notes: dict[str, str] = {}
        self._blocks: list[list[_Block]] = [[]]  # blocks of the body, and of open cells and notes
        self._paragraphs: list[list[str]] = []  # a text box is a paragraph inside another one
        self._is_item: list[bool] = []
        self._rows: list[list[list[str]]] = []  # cells of the rows of the open tables
        self._note = ""
        self._skipped = 0  # depth inside a skipped element; 0 outside of one
        self._is_text = False
        self._is_hidden = False

    def join(self) -> str:
        """Return the text of the blocks."""
        return _join_blocks(self._blocks[-1])

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""
        if self._skipped or name in _SKIPPED:
            self._skipped += 1
        elif name == "p":
            self._paragraphs.append([])
            self._is_item.append(False)
        elif name == "numPr" and self._is_item:
            self._is_item[-1] = True
        elif name == "r":
            self._is_hidden = False
        elif name == "vanish":
            self._is_hidden = attributes.get("val", "true") not in ("false", "0", "off")
        elif name == "t":
            self._is_text = not self._is_hidden
        elif name in _BREAKS:
            self._add(_BREAKS[name])
        elif name in ("footnoteReference", "endnoteReference") and "id" in attributes:
            self.marks.append(_Mark(name.replace("Reference", "s"), attributes["id"]))
            self._add(f"[{len(self.marks)}]")
        elif name == "tbl":
            self._rows.append([])
        elif name == "tr" and self._rows:
            self._rows[-1].append([])
        elif name in ("tc", "footnote", "endnote"):
            self._blocks.append([])
            self._note = attributes.get("id", "")

    def end(self, name: str) -> None:
        """Receive the end of an element."""
        if self._skipped:
            self._skipped -= 1
        elif name == "t":
            self._is_text = False
        elif name == "p" and self._paragraphs:
            text = "".join(self._paragraphs.pop()).strip()
            is_item = self._is_item.pop()
            if text:
                self._blocks[-1].append(_Block(text, is_item))
        elif name == "tc" and len(self._blocks) > 1:
            cell = " ".join(block.text for block in self._blocks.pop())
            if self._rows and self._rows[-1]:
                self._rows[-1][-1].append(" ".join(cell.split()))
        elif name == "tbl" and self._rows:
            rows = ["\t".join(row) for row in self._rows.pop()]
            self._blocks[-1].append(_Block("\n".join(row for row in rows if row.strip())))
        elif name in ("footnote", "endnote") and len(self._blocks) > 1:
            self.notes[self._note] = " ".join(block.text for block in self._blocks.pop())

    def text(self, data: str) -> None:
        """Receive characters."""
        if self._is_text and not self._skipped:
            self._add(data)

    def _add(self, text: str) -> None:
        if self._paragraphs:
            self._paragraphs[-1].append(text)


def _join_blocks(blocks: list[_Block]) -> str:
    """Return blocks separated by blank lines, and items of a list by line ends."""
    parts: list[str] = []
    was_item = False
    for text, is_item in blocks:
        if text:
            parts += ["\n" if was_item and is_item else "\n\n", text]
            was_item = is_item
    return "".join(parts[1:])
