"""Detect the format of a file from its name and first bytes, for stages 01 and 02."""

from __future__ import annotations

import json
import posixpath
import re

HEAD_BYTES = 16_384

_SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".csv": "csv",
    ".tsv": "tsv",
}
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
}
_MAGICS = tuple(_MAGIC)
# Kinds of documents that contain more than text; --extract of stage 02 reads their text.
HTML, PDF, DOCX, EPUB = DOCUMENTS = "html", "pdf", "docx", "epub"
BINARY_DOCUMENTS = (PDF, DOCX, EPUB)
_DOCUMENT_SUFFIXES = {
    ".html": HTML,
    ".htm": HTML,
    ".xhtml": HTML,
    ".shtml": HTML,
    ".pdf": PDF,
    ".docx": DOCX,
    ".docm": DOCX,
    ".epub": EPUB,
}
_PDF_MAGIC = b"%PDF-"
_PDF_MAGIC_WITHIN = 1024  # bytes in which PDF readers look for the signature
_ZIP_MAGIC = b"PK\x03\x04"
_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the container of an encrypted DOCX
_EPUB_TYPE = b"mimetypeapplication/epub+zip"  # name and content of the first member
_PAGE_START = re.compile(
    r"(?:\s|\ufeff|<\?xml[^>]{0,500}\?>|<!--(?:(?!-->).){0,5000}-->)*"
    r"(?:<!doctype\s+html\b|<html\b)",
    re.IGNORECASE | re.DOTALL,
)
_TAG = re.compile(rb"<[a-zA-Z!/]")
_ARROW_STREAM = b"\xff\xff\xff\xff"
_MAX_ARROW_SCHEMA = 1 << 26
_PACKED_SUFFIXES = {".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd"}
UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_UTF32_BOM = b"\xff\xfe\x00\x00"
# Control characters that are rare in text; tab, line feed, form feed, carriage return and escape
# are not among them.
_CONTROLS = bytes(set(range(0x20)) - set(b"\b\t\n\f\r\x1b")) + b"\x7f"
_MAX_CONTROL_SHARE = 0.05


def sniff_kind(name: str, head: bytes) -> str:
    """Return the kind of a file: `text`, `json`, `jsonl`, `yaml`, …, `binary` or `empty`.

    name: path of the file. head: its first HEAD_BYTES bytes. Archives, tables and binary files are
    recognised by their content. The suffix decides among text formats, unless the first bytes
    contradict it: a `.json` file without JSON is text, and JSON and JSON Lines are
    recognised by their first lines.
    """
    if not head:
        return "empty"
    suffix = find_suffix(name)
    if head.startswith(_MAGICS):
        return next(kind for magic, kind in _MAGIC.items() if head.startswith(magic))
    if _is_arrow_stream(head):
        return "arrow"
    if (document := sniff_document(name, head)) in BINARY_DOCUMENTS:
        return document
    if _is_binary(head):
        return "binary"
    kind = _SUFFIXES.get(suffix, "text")
    if kind in ("json", "jsonl"):
        return _choose_json_kind(kind, head)
    return "jsonl" if not suffix and _starts_as_json_lines(head) else kind


def find_suffix(name: str) -> str:
    """Return the suffix of a path in lower case, without that of a compressed file."""
    stem, suffix = posixpath.splitext(name.lower())
    return posixpath.splitext(stem)[1] if suffix in _PACKED_SUFFIXES else suffix


def name_document(name: str) -> str:
    """Return the kind of document that the suffix of a path indicates, "" for other files."""
    return _DOCUMENT_SUFFIXES.get(find_suffix(name), "")


def sniff_document(name: str, head: bytes) -> str:
    """Return `html`, `pdf`, `docx` or `epub` for a document of this kind, "" for other files.

    name, head: as for `sniff_kind`; the file must not be compressed. The suffix decides only if the
    content is ambiguous: a page without `<html>` or a doctype, or an archive whose first members
    fit several kinds.
    """
    named = name_document(name)
    if head.startswith(_ZIP_MAGIC):
        if head[30:].startswith(_EPUB_TYPE) or b"META-INF/container.xml" in head:
            return EPUB
        if b"word/document.xml" in head:
            return DOCX
        return named if named in (DOCX, EPUB) else ""
    if head.startswith(_OLE_MAGIC):
        return DOCX if named == DOCX else ""
    start = head[:_PDF_MAGIC_WITHIN]
    if start.lstrip().startswith(_PDF_MAGIC) or (named == PDF and _PDF_MAGIC in start):
        return PDF
    return HTML if _is_page(head, named == HTML) else ""


def _is_page(head: bytes, is_named: bool) -> bool:
    """Return whether a file is an HTML page. is_named: its suffix says so."""
    if is_utf16(head):
        text = head.decode("utf-16", "ignore")
        return bool(_PAGE_START.match(text)) or (is_named and "<" in text)
    if is_named and _TAG.search(head):
        return True
    start = head.removeprefix(UTF8_BOM)
    return start.lstrip()[:1] == b"<" and bool(_PAGE_START.match(start.decode("latin-1")))


def _choose_json_kind(kind: str, head: bytes) -> str:
    """Return `json`, `jsonl` or `text` for a file with a suffix of JSON or JSON Lines."""
    if is_utf16(head):
        return kind
    start = head.removeprefix(UTF8_BOM).lstrip()
    if start and start[:1] not in b'{["-0123456789tfnNI':
        return "text"
    if kind == "json":
        return "jsonl" if _starts_as_json_lines(head) else kind
    return "json" if start.partition(b"\n")[0].strip() in (b"{", b"[") else kind


def _is_arrow_stream(head: bytes) -> bool:
    """Return whether a file starts with the schema message of an Arrow stream."""
    if not head.startswith(_ARROW_STREAM):
        return False
    size = int.from_bytes(head[4:8], "little")
    return 0 < size < _MAX_ARROW_SCHEMA and size % 8 == 0


def is_utf16(head: bytes) -> bool:
    """Return whether a file starts with the byte order mark of UTF-16."""
    return head.startswith(_UTF16_BOMS) and not head.startswith(_UTF32_BOM)


def _is_binary(head: bytes) -> bool:
    """Return whether a file is binary, by its first bytes."""
    if is_utf16(head):
        return False
    controls = len(head) - len(head.translate(None, _CONTROLS))
    return b"\0" in head or controls > _MAX_CONTROL_SHARE * len(head)


def _starts_as_json_lines(head: bytes) -> bool:
    """Return whether each of the first two lines is a complete JSON object or list."""
    first, _, rest = head.partition(b"\n")
    second, newline, _ = rest.partition(b"\n")
    first = first.removeprefix(UTF8_BOM).strip()
    if first[:1] not in (b"{", b"[") or second[:1] != first[:1]:
        return False
    cut_short = not newline and len(head) >= HEAD_BYTES
    return _is_json(first) and (cut_short or _is_json(second))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
