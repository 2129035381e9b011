"""Which reader takes which kind of file.

A reader gets an open Source and hands the documents in it to Documents: `text` for plain text,
`value` for nested dicts, lists and strings. It notes what it cannot read and keeps what came
before. A new format is a function here, and its kind in kinds.py.
"""

from __future__ import annotations

from collections.abc import Callable

from lib.corpus import columnar_reader, json_reader, table_reader, yaml_reader
from lib.corpus.documents import SKIPPED_FILE, Documents
from lib.corpus.large_text import read_large_text
from lib.corpus.source import Source

Reader = Callable[[Source, Documents], None]


def read_text(source: Source, documents: Documents) -> None:
    """Take a plain-text file as one document; a damaged archive holds only a part of it."""
    data = source.read()
    if data is None:
        read_large_text(source, documents)
    elif source.damage:
        documents.problem("cut", f"the only document is cut: {source.damage}", SKIPPED_FILE)
    else:
        documents.text(data)


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


def read(source: Source, documents: Documents) -> None:
    """Read a file of any kind, or note why it gives nothing."""
    reader = READERS.get(source.kind)
    if reader:
        reader(source, documents)
    elif source.kind == "binary":
        documents.problem("binary", "not text", SKIPPED_FILE)
    elif source.kind == "empty":
        kind, message = ("cut", source.damage) if source.damage else ("empty", "it is empty")
        documents.problem(kind, message, SKIPPED_FILE)
    else:
        documents.problem("unsupported", f"{source.kind} files cannot be read here", SKIPPED_FILE)
