"""Choose the reader for a kind of file, and read plain text.

A reader gets an open RawFile and adds its documents to Documents: plain text with `add_text`,
nested dicts, lists and strings with `add_value`. It reports damage and keeps the documents before
it. For a new format, add a reader to READERS and a kind to kinds.py.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable

from lib.corpus import (
    columnar_reader,
    encoding,
    json_reader,
    kinds,
    table_reader,
    yaml_reader,
)
from lib.corpus.documents import SKIPPED_FILE, Documents
from lib.corpus.extract.reader import read_document
from lib.corpus.raw_file import RawFile

Reader = Callable[[RawFile, Documents], None]


def read_text(raw: RawFile, documents: Documents) -> None:
    """Add a plain-text file of any size as one document; a damaged archive is skipped."""
    data = raw.read()
    if data is None:
        _read_large_text(raw, documents)
    elif not _is_cut(raw, documents):
        documents.add_text(data)


def _read_large_text(raw: RawFile, documents: Documents) -> None:
    """Write a text too large for memory to a file as valid UTF-8, and add that file."""
    decoded = raw.decode(documents.fallback)
    hasher = hashlib.sha256()
    characters = 0
    size = 0
    is_blank = True
    with tempfile.TemporaryFile(dir=raw.scratch) as file:
        for text in decoded:
            data, _ = encoding.encode_text(text)
            hasher.update(data)
            file.write(data)
            characters = characters + len(text)
            size = size + len(data)
            is_blank = is_blank and text.isspace()
        file.flush()
        documents.tally.replaced += decoded.replaced
        if _is_cut(raw, documents):
            return
        if is_blank:
            documents.note_blank()
        else:
            documents.add_large_text(file, size, characters, hasher.digest())


def _is_cut(raw: RawFile, documents: Documents) -> bool:
    """Return whether the only document of a file is truncated; if so, report that."""
    if raw.damage:
        documents.note("cut", f"the only document is incomplete: {raw.damage}", SKIPPED_FILE)
    return bool(raw.damage)


READERS: dict[str, Reader] = {
    "text": read_text,
    "json": json_reader.read_json,
    "jsonl": json_reader.read_json_lines,
    "yaml": yaml_reader.read_yaml,
    "csv": table_reader.read_table,
    "tsv": table_reader.read_table,
    "parquet": columnar_reader.read_parquet,
    "arrow": columnar_reader.read_arrow,
}


def read_documents(raw: RawFile, documents: Documents) -> None:
    """Read a file of any kind, or report why it is skipped."""
    if raw.document in documents.extracts:
        read_document(raw, documents)
        return
    documents.tally.not_extracted.update(filter(None, [raw.document]))
    reader = READERS.get(raw.kind)
    if raw.kind == "text" and documents.as_data:
        documents.add_text(b"")  # plain text is skipped without reading it
    elif reader:
        reader(raw, documents)
    elif raw.kind == "binary":
        documents.note("binary", "a binary file, not text", SKIPPED_FILE)
    elif raw.kind in kinds.BINARY_DOCUMENTS:
        message = f"a {raw.kind.upper()} file, not text; --extract {raw.kind} reads it"
        documents.note("binary", message, SKIPPED_FILE)
    elif raw.kind == "empty":
        kind, message = ("cut", raw.damage) if raw.damage else ("empty", "the file is empty")
        documents.note(kind, message, SKIPPED_FILE)
    else:
        documents.note("unsupported", f"{raw.kind} files are not supported here", SKIPPED_FILE)
