"""Read a document whose text is extracted, and report why it yields none."""

from __future__ import annotations

from lib.corpus.documents import KEPT, SKIPPED_FILE, Documents
from lib.corpus.extract.extracted import DAMAGED, TOO_LARGE, Extracted, Refusal
from lib.corpus.extract.process import share_extraction
from lib.corpus.raw_file import RawFile

MOST_FILE_BYTES = 256_000_000  # a larger document is skipped, because it must fit in memory


def read_document(raw: RawFile, documents: Documents) -> None:
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
    data = raw.read(MOST_FILE_BYTES)
    if data is None:
        raise Refusal(
            TOO_LARGE,
            f"larger than {MOST_FILE_BYTES:,} bytes, the limit for an extracted document",
        )
    if raw.damage:
        raise Refusal("cut", f"the document is incomplete: {raw.damage}")
    return share_extraction().extract(
        raw.document, data, documents.fallback, documents.extract_seconds
    )
