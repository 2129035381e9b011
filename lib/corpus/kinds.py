"""Detect the format of a file from its name and first bytes, for stages 01 and 02."""

from __future__ import annotations

import codecs
import posixpath
import re
import unicodedata
from collections import Counter

from lib.core import json_heads, placeholders, reading
from lib.core.placeholders import ERROR_PAGE, HTML_START, POINTER, Placeholder

HEAD_BYTES = placeholders.HEAD_BYTES

_SUFFIXES = {
    ".json": json_heads.JSON,
    ".jsonl": json_heads.JSON_LINES,
    ".ndjson": json_heads.JSON_LINES,
    ".yaml": "yaml",
    ".yml": "yaml",
    ".csv": "csv",
    ".tsv": "tsv",
}
MISMATCH = "mismatch"
FAULTS = (POINTER, ERROR_PAGE, MISMATCH)  # kinds of files that are not what their names say
# Formats of text and of binary data that suffixes promise. Any text may have another suffix.
_TEXT_FORMATS = {
    ".json": "JSON",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".yaml": "YAML",
    ".yml": "YAML",
    ".csv": "CSV",
    ".tsv": "TSV",
}
_TABLES = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
_BINARY_FORMATS = _TABLES | {
    ".orc": "ORC",
    ".avro": "Avro",
    ".pdf": "PDF",
    ".docx": "DOCX",
    ".docm": "DOCX",
    ".epub": "EPUB",
    ".xlsx": "an Excel workbook",
    ".zip": "a zip archive",
    ".7z": "a 7z archive",
    ".tar": "a tar archive",
    ".tgz": "a compressed tar archive",
    ".rar": "a RAR archive",
    ".safetensors": "safetensors",
    ".gguf": "GGUF",
    ".npy": "a NumPy array",
    ".npz": "NumPy arrays",
}
_COLUMNAR = {b"PAR1": "parquet", b"ARROW1": "arrow"}
# Formats that are not read, and how to make their content readable.
UNREAD = {
    "zip": ("a zip archive", "unpack it: `unzip FILE -d DIR`"),
    "7z": ("a 7z archive", "unpack it: `7z x FILE -oDIR`"),
    "rar": ("a RAR archive", "unpack it: `unrar x FILE DIR/`"),
    "tar": ("a tar archive", "unpack it: `mkdir DIR; tar -xf FILE -C DIR`"),
    "compress": ("a file of the program `compress`", "unpack it: `uncompress FILE`"),
    "xlsx": ("an Excel workbook", "save its sheets as CSV in UTF-8"),
}
_UNREAD_MAGICS = {
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x1f\x9d": "compress",
}
_TAR_MARK = slice(257, 262)
_TAR_MAGIC = b"ustar"
_WORKBOOK = b"xl/"  # the directory in the archive
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
_TAG = re.compile(rb"<[a-zA-Z!/]")
_ARROW_STREAM = b"\xff\xff\xff\xff"
_MAX_ARROW_SCHEMA = 1 << 26
UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}
_UTF32_BOMS = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_SHOWN = 60  # characters of a text in a message
# Control characters that are rare in text; tab, line feed, form feed, carriage return and escape
# are not among them.
_CONTROLS = bytes(set(range(0x20)) - set(b"\b\t\n\f\r\x1b")) + b"\x7f"
_PRINTABLE = bytes(range(0x20, 0x7F))
_LAYOUT = "\t\n\f\r"
_MAX_CONTROL_SHARE = 0.05
_BEGINNING = 1024  # bytes
_MAX_STRANGE_SHARE = 0.005  # of characters that are rare in text of UTF-16
_STRANGE = {"Cc", "Cn", "Co", "Cs"}  # control, unassigned, private use and lone surrogates
_MIN_NUL_SHARE = 0.4  # of the bytes of UTF-16, if without NUL they would be an 8-bit text
_MIN_ASCII_SHARE = 0.9  # of the bytes of a text in a code page


def sniff_kind(name: str, head: bytes) -> str:
    """Return the kind of a file: `text`, `json`, `jsonl`, `yaml`, …, `binary` or `empty`.

    name: path of the file. head: its first HEAD_BYTES bytes. Archives, tables and binary files are
    recognised by their content. The suffix decides among text formats, but any text is JSON Lines
    if most of its lines are JSON objects. The kind of a file that is not what its name says is one
    of FAULTS; `find_fault` describes the fault.
    """
    if not head:
        return "empty"
    if compression := reading.sniff_compression(name, head):
        return compression
    head = mark_utf16(head)
    fault = find_fault(name, head)
    return fault.kind if fault else _sniff_content(name, head)


def find_fault(name: str, head: bytes) -> Placeholder | None:
    """Return why a file is not what its name says, None if it may be.

    name, head: as for `sniff_kind`; the content must not be compressed.
    """
    head = mark_utf16(head)
    if pointer := placeholders.find_pointer(head):
        return pointer
    kind = _sniff_content(name, head)
    suffix = find_suffix(name)
    compression = posixpath.splitext(name)[1] if reading.strip_compression(name) != name else ""
    is_json = kind in (json_heads.JSON, json_heads.JSON_LINES)
    if kind in _COLUMNAR.values() or not (
        is_json or compression or suffix in _TEXT_FORMATS or suffix in _BINARY_FORMATS
    ):
        return None
    is_text = is_json or kind in ("text", HTML, *_SUFFIXES.values())
    if is_text and (page := placeholders.find_page(head)):
        return page
    if suffix in _TEXT_FORMATS and (not is_text or kind == "text"):
        expected = _TEXT_FORMATS[suffix]
    elif suffix in _TABLES or (suffix in _BINARY_FORMATS and is_text):
        expected = _BINARY_FORMATS[suffix]
    elif compression and not is_json:
        expected = f"compressed data ({compression})"
    else:
        return None
    found, cure = _describe_content(kind, head, is_text)
    return Placeholder(MISMATCH, f"the name says {expected}, but the file contains {found}", cure)


def _describe_content(kind: str, head: bytes, is_text: bool) -> tuple[str, str]:
    """Return what a file with a wrong name contains, and the cure."""
    cure = "fetch it again, or give it the suffix of its content"
    if is_text:
        beginning = " ".join(placeholders.decode_head(head[:400]).split())[:_SHOWN]
        return f'text that begins with "{beginning}"', cure
    if kind in UNREAD:
        return UNREAD[kind]
    if not head.strip(b"\0"):
        return "only NUL bytes, as after a crash or a copy that was cut", "fetch it again"
    if head.startswith(_UTF32_BOMS):
        return "UTF-32", "convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`"
    return (f"a {kind.upper()} file" if kind in BINARY_DOCUMENTS else "binary data"), cure


def _sniff_content(name: str, head: bytes) -> str:
    """Return the kind of content that is not compressed; a `.json` file without JSON is `text`."""
    suffix = find_suffix(name)
    for magic, kind in (_COLUMNAR | _UNREAD_MAGICS).items():
        if head.startswith(magic):
            return kind
    if _is_arrow_stream(head):
        return "arrow"
    if (document := sniff_document(name, head)) in BINARY_DOCUMENTS:
        return document
    if head.startswith(_ZIP_MAGIC):
        if _WORKBOOK in head:
            return "xlsx"
        return "zip" if suffix in ("", ".zip", *_TEXT_FORMATS) else "binary"
    if head[_TAR_MARK] == _TAR_MAGIC:
        return "tar"
    # A crash may leave NUL bytes in a file of records; they cost only the records there.
    is_padded = suffix in _TEXT_FORMATS and not head.startswith(_UTF32_BOMS)
    if _is_binary(head.replace(b"\0", b"") or head if is_padded else head):
        return "binary"
    kind = _SUFFIXES.get(suffix, "text")
    if kind in (json_heads.JSON, json_heads.JSON_LINES):
        return json_heads.choose_json_kind(kind, head) or "text"
    return json_heads.find_json(head) or kind


def find_suffix(name: str) -> str:
    """Return the suffix of a path in lower case, without that of a compressed file."""
    return posixpath.splitext(reading.strip_compression(name.lower()))[1]


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
        return bool(HTML_START.match(text)) or (is_named and "<" in text)
    if is_named and _TAG.search(head):
        return True
    start = head.removeprefix(UTF8_BOM)
    return start.lstrip()[:1] == b"<" and bool(HTML_START.match(start.decode("latin-1")))


def _is_arrow_stream(head: bytes) -> bool:
    """Return whether a file starts with the schema message of an Arrow stream."""
    if not head.startswith(_ARROW_STREAM):
        return False
    size = int.from_bytes(head[4:8], "little")
    return 0 < size < _MAX_ARROW_SCHEMA and size % 8 == 0


def is_utf16(head: bytes) -> bool:
    """Return whether a file starts with the byte order mark of UTF-16."""
    return head.startswith((*_UTF16_BOMS.values(),)) and not head.startswith(_UTF32_BOMS)


def mark_utf16(head: bytes) -> bytes:
    """Return the first bytes of a file; text in UTF-16 without a byte order mark gets one.

    Such a text contains NUL bytes, and has few strange characters in one of the byte orders. If it
    has few in both, the order that gives more characters of ASCII is right.
    """
    if b"\0" not in head or is_utf16(head) or head.startswith(_UTF32_BOMS):
        return head
    if head.count(0) < _MIN_NUL_SHARE * len(head) and _is_8_bit_text(head.replace(b"\0", b"")):
        return head
    ascii_counts = {}
    for codec, mark in _UTF16_BOMS.items():
        # Most binary data is recognised by its beginning, which is 16 times faster.
        if _read_utf16(head[:_BEGINNING], codec, _MAX_CONTROL_SHARE) is not None:
            ascii_counts[mark] = _read_utf16(head, codec, _MAX_STRANGE_SHARE) or 0
    if not any(ascii_counts.values()):
        return head
    return max(ascii_counts, key=ascii_counts.__getitem__) + head


def _read_utf16(data: bytes, codec: str, most: float) -> int | None:
    """Return how many characters of a text in UTF-16 are ASCII, None if it is hardly a text.

    most: share of characters that may be strange.
    """
    counts = Counter(codecs.getincrementaldecoder(codec)("surrogatepass").decode(data))
    strange = sum(
        count
        for character, count in counts.items()
        if character not in _LAYOUT and unicodedata.category(character) in _STRANGE
    )
    if strange > most * counts.total():
        return None
    return sum(count for character, count in counts.items() if character < "\x80")


def _is_8_bit_text(head: bytes) -> bool:
    """Return whether bytes without NUL are a text of UTF-8, or of a code page of Europe."""
    if _is_binary(head):
        return False
    if len(head) - len(head.translate(None, _PRINTABLE)) > _MIN_ASCII_SHARE * len(head):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _is_binary(head: bytes) -> bool:
    """Return whether a file is binary, by its first bytes."""
    if is_utf16(head):
        return False
    controls = len(head) - len(head.translate(None, _CONTROLS))
    return b"\0" in head or controls > _MAX_CONTROL_SHARE * len(head)
