"""Plain text too large for memory: cleaned into a file, and from there into a row."""

from __future__ import annotations

import hashlib
import tempfile

from lib.corpus import encoding
from lib.corpus.documents import SKIPPED_FILE, Documents
from lib.corpus.source import Source


def read_large_text(source: Source, documents: Documents) -> None:
    """Take a file of any size as one document."""
    pieces = source.pieces(documents.fallback)
    hasher, characters, size, is_blank = hashlib.sha256(), 0, 0, True
    with tempfile.TemporaryFile(dir=source.scratch) as file:
        for text in pieces:
            data, _ = encoding.encode(text)
            hasher.update(data)
            file.write(data)
            characters, size = characters + len(text), size + len(data)
            is_blank = is_blank and text.isspace()
        file.flush()
        documents.tally.replaced += pieces.replaced
        if source.damage:
            documents.problem("cut", f"the only document is cut: {source.damage}", SKIPPED_FILE)
        elif is_blank:
            documents.blank()
        else:
            documents.large_text(file, size, characters, hasher.digest())
