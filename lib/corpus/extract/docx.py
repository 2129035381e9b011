"""Extract the text of a DOCX document with mammoth."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from xml.etree import ElementTree

from lib.corpus.extract.archive import Archive, strip_namespace
from lib.corpus.extract.extracted import (
    DAMAGED,
    ENCRYPTED,
    NO_TEXT,
    Extracted,
    Refusal,
    clean_text,
)
from lib.corpus.extract.html import convert_page

_OLE_MAGIC = b"\xd0\xcf\x11\xe0"  # Word stores a document with a password in such a container
_DOCUMENT = "word/document.xml"
_PARTS = ("footnotes", "endnotes", "styles", "numbering")
# mammoth leaves out elements that it does not know, with their text. They get the name of a
# similar element; `smartTag` stands for any element around text.
_RENAMED = {
    **dict.fromkeys(("fldSimple", "dir", "bdo", "ruby", "rubyBase", "rt"), "smartTag"),
    **{"drawing": "pict", "object": "pict", "cr": "br", "ptab": "tab"},
}
_DROPPED = {"sdtPr", "gridSpan", "commentReference", "bookmarkStart"}
_NEEDED = {"footnoteReference": "id", "endnoteReference": "id", "sym": "char"}
_BACK_LINK = re.compile(r' ?<a href="#(?:foot|end)note-ref-\d+">↑</a>')
_CELL_TAG = re.compile(r"<(/?)(td|th|p|table|tr)\b[^>]*>")


def extract_docx(data: bytes, fallback: str) -> Extracted:
    """Return the text of a document, with its footnotes and endnotes at the end.

    Paragraphs are separated by blank lines, list items and rows of a table by line ends, and cells
    by tabs. Headers, footers and comments are left out. fallback: unused, since XML declares its
    encoding. Raises Refusal if the file yields no text.
    """
    import mammoth

    if data.startswith(_OLE_MAGIC):
        raise Refusal(ENCRYPTED, "the DOCX file is encrypted, or it is a DOC file of Word 97")
    result = mammoth.convert_to_html(
        _prepare_document(Archive(data)), include_embedded_style_map=False, id_prefix=""
    )
    text = clean_text(convert_page(_join_cells(_BACK_LINK.sub("", result.value))))
    if not text:
        raise Refusal(NO_TEXT, "the DOCX file contains no text")
    return Extracted(text)


def _prepare_document(archive: Archive) -> io.BytesIO:
    """Return a document for mammoth that contains only the parts with text and their styles.

    The parts have their usual names, so that it needs no relationships.
    """
    main = archive.find(_read_targets(archive, "_rels/.rels", "").get("officeDocument", ""))
    main = main or archive.find(_DOCUMENT)
    if not main:
        raise Refusal(DAMAGED, f"the DOCX file has no {_DOCUMENT}")
    folder, base = posixpath.split(main)
    targets = _read_targets(archive, f"{folder}/_rels/{base}.rels".lstrip("/"), folder)
    parts = {"document": main}
    for kind in _PARTS:
        name = archive.find(targets.get(kind, "")) or archive.find(f"{folder}/{kind}.xml")
        if name:
            parts[kind] = name
    roots = {kind: archive.parse(name) for kind, name in parts.items()}
    for kind in ("footnote", "endnote"):
        _drop_references(roots["document"], kind, roots.get(f"{kind}s"))
    prepared = io.BytesIO()
    with zipfile.ZipFile(prepared, "w") as file:
        for kind, root in roots.items():
            _rename_elements(root)
            file.writestr(f"word/{kind}.xml", ElementTree.tostring(root))
    prepared.seek(0)
    return prepared


def _read_targets(archive: Archive, name: str, folder: str) -> dict[str, str]:
    """Return the names of related parts by the kind of their relationship."""
    if not archive.find(name):
        return {}
    return {
        posixpath.basename(element.get("Type", "")): posixpath.normpath(
            posixpath.join("/", folder, element.get("Target", ""))
        ).lstrip("/")
        for element in archive.parse(name).iter()
    }


def _drop_references(
    root: ElementTree.Element, kind: str, notes: ElementTree.Element | None
) -> None:
    """Make references to missing notes harmless, which are errors for mammoth."""
    namespace = root.tag.rpartition("}")[0] + "}" if "}" in root.tag else ""
    found = () if notes is None else [note.get(f"{namespace}id") for note in notes]
    for reference in root.iter(f"{namespace}{kind}Reference"):
        if reference.get(f"{namespace}id") not in found:
            reference.attrib.clear()


def _rename_elements(root: ElementTree.Element) -> None:
    """Replace elements that mammoth does not know, and remove hidden text."""
    namespace = root.tag.rpartition("}")[0] + "}" if "}" in root.tag else ""
    for parent in list(root.iter()):
        children: list[ElementTree.Element] = []
        for child in parent:
            if strip_namespace(child.tag) == "AlternateContent":
                children += list(child)[:1]  # the second one repeats the text for old programs
            elif not _is_left_out(child, namespace):
                children.append(child)
        parent[:] = children
    for element in root.iter():
        name = strip_namespace(element.tag)
        if not element.tag.startswith(namespace) and name not in ("r", "t"):
            name = "smartTag"
        element.tag = f"{namespace}{_RENAMED.get(name, name)}"
        if name == "hyperlink":
            element.attrib.clear()


def _is_left_out(element: ElementTree.Element, namespace: str) -> bool:
    """Return whether an element is hidden text, or of no use for the text."""
    name = strip_namespace(element.tag)
    if name == "r":
        hidden = element.find(f"{namespace}rPr/{namespace}vanish")
        return hidden is not None and hidden.get(f"{namespace}val") not in ("false", "0", "off")
    needed = _NEEDED.get(name)
    return name in _DROPPED or (needed is not None and f"{namespace}{needed}" not in element.attrib)


def _join_cells(page: str) -> str:
    """Return a page with one line in each cell of a table, also if it contains another table."""
    parts = []
    depth = 0
    end = 0
    for tag in _CELL_TAG.finditer(page):
        parts.append(page[end : tag.start()])
        end = tag.end()
        is_cell = tag[2] in ("td", "th")
        depth -= 1 if is_cell and tag[1] else 0
        parts.append(" " if depth else tag[0])
        depth += 1 if is_cell and not tag[1] else 0
    return "".join([*parts, page[end:]])
