"""Choose the reader for a kind of file; read plain text, and documents whose text is extracted.

A reader gets an open RawFile and adds its documents to Documents: plain text with `add_text`,
nested dicts, lists and strings with `add_value`. It reports damage and keeps the documents before
it. For a new format, add a reader to READERS and a kind to kinds.py.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable

from lib.corpus import columnar_reader, encoding, json_reader, kinds, table_reader, yaml_reader
from lib.corpus.documents import KEPT, SKIPPED_FILE, Documents
from lib.corpus.extract.extracted import DAMAGED, TOO_LARGE, Extracted, Refusal
from lib.corpus.extract.process import share_extraction
from lib.corpus.raw_file import RawFile

Reader = Callable[[RawFile, Documents], None]
_MOST_DOCUMENT_BYTES = 256_000_000  # a larger document is skipped, because it must fit in memory


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


def _add_extracted_text(raw: RawFile, documents: Documents) -> None:
    """Add the text of an HTML, PDF, DOCX or EPUB file as one document.

    The file is read here and extracted in a child process, so that a hang or a crash of a library
    costs only this file.
    """
    try:
        text, replaced, lost = _extract_text(raw, documents)
    except Refusal as refusal:
        documents.tally.without_text[f"{raw.document}: {refusal.kind}"] += 1
        documents.note(refusal.kind, refusal.message, SKIPPED_FILE)
        return
    documents.tally.replaced += replaced
    documents.tally.extracted[raw.document] += 1
    if lost:
        documents.note(DAMAGED, lost, KEPT)
    documents.add_text(text.encode())


def _extract_text(raw: RawFile, documents: Documents) -> Extracted:
    """Return the text of a file; raises Refusal if it yields none."""
    data = raw.read(_MOST_DOCUMENT_BYTES)
    if data is None:
        raise Refusal(
            TOO_LARGE,
            f"larger than {_MOST_DOCUMENT_BYTES:,} bytes, the limit for an extracted document",
        )
    if raw.damage:
        raise Refusal("cut", f"the document is incomplete: {raw.damage}")
    return share_extraction().extract(
        raw.document, data, documents.fallback, documents.extract_seconds
    )


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
    if raw.document in documents.extracts and raw.kind not in kinds.FAULTS:
        _add_extracted_text(raw, documents)
        return
    documents.tally.not_extracted.update(filter(None, [raw.document]))
    reader = READERS.get(raw.kind)
    if raw.kind == "text" and documents.as_data:
        documents.add_text(b"")  # plain text is skipped without reading it
    elif reader:
        reader(raw, documents)
        documents.tally.replaced += raw.replaced
    elif raw.kind in kinds.FAULTS and (fault := kinds.find_fault(raw.name, raw.head)):
        documents.note(fault.kind, str(fault), SKIPPED_FILE)
    elif raw.kind == "binary":
        documents.note("binary", "a binary file, not text", SKIPPED_FILE)
    elif raw.kind in kinds.BINARY_DOCUMENTS:
        message = f"a {raw.kind.upper()} file, not text; --extract {raw.kind} reads it"
        documents.note("binary", message, SKIPPED_FILE)
    elif raw.kind == "empty":
        kind, message = ("cut", raw.damage) if raw.damage else ("empty", "the file is empty")
        documents.note(kind, message, SKIPPED_FILE)
    else:
        content, cure = kinds.UNREAD.get(
            raw.kind, (f"{raw.kind} data in {raw.kind} data", "unpack it")
        )
        documents.note("unsupported", f"{content}, which is not read; {cure}", SKIPPED_FILE)
