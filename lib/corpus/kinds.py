"""Detect the format of a file from its name and first bytes, for stages 01 and 02."""

from __future__ import annotations

import json
import posixpath

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
    stem, suffix = posixpath.splitext(name.lower())
    if suffix in _PACKED_SUFFIXES:  # already decompressed, otherwise the magic number would match
        suffix = posixpath.splitext(stem)[1]
    if head.startswith(_MAGICS):
        return next(kind for magic, kind in _MAGIC.items() if head.startswith(magic))
    if _is_arrow_stream(head):
        return "arrow"
    if _is_binary(head):
        return "binary"
    kind = _SUFFIXES.get(suffix, "text")
    if kind in ("json", "jsonl"):
        return _choose_json_kind(kind, head)
    return "jsonl" if not suffix and _starts_as_json_lines(head) else kind


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
