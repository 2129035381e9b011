"""Say before a build which fields of records it trains, if that may be surprising.

By default a row contains every string of a record. A crawl has a field `text` beside addresses, IDs
and dates, which nobody wants to train on. A record with a conversation may have keys that are not
used at all.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lib.core import commands, log, units
from lib.core.data_names import TEST
from lib.core.errors import MOVE_TEMPORARY, name_full_disk
from lib.corpus import kinds
from lib.corpus.documents import Documents
from lib.corpus.inputs import InputFile
from lib.corpus.pool import UnitPool
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.tally import Tally
from lib.corpus.text_documents import Fields
from lib.corpus.work_units import FileSpan, WorkUnit

_FIELDS = ("text", "content")
# YAML is left out: its parser may crash on a hostile file, and this is the parent process.
_RECORDS = ("json", "jsonl", "csv", "tsv", "parquet", "arrow")
_FILES = 8
_RECORDS_PER_FILE = 20
_LARGEST_FILE = 32_000_000  # bytes of a file that must be read as a whole
_NEARLY_ALL = 0.9
_NAMED = 6
_HEADS = 3  # files whose beginnings are read for keys that are not used
_HEAD_BYTES = 1_000_000


class _SampleIsFull(Exception):
    """Ends the reading of a file."""


class _FirstRecords(Documents):
    """Keeps the first records of files."""

    def __init__(self) -> None:
        super().__init__(RowOptions(), {}, io.BytesIO(), io.BytesIO(), {})
        self.records: list[Any] = []

    def add_text(self, data: bytes) -> None:
        """Ignore a text."""

    def add_large_text(self, text: BinaryIO, size: int, characters: int, sha256: bytes) -> None:
        """Ignore a text."""

    def add_values(self, values: Sequence[Any]) -> bool:
        """Return False, so that the caller passes each record to `add_value`."""
        return False

    def add_value(
        self, value: Any, offset: int | None = None, line: int | None = None, number: int = 0
    ) -> None:
        """Keep a record. Raises _SampleIsFull after the last one that is wanted."""
        self.records.append(value)
        if len(self.records) >= _RECORDS_PER_FILE:
            raise _SampleIsFull


def warn_about_fields(row_options: RowOptions, folder: Path, files: Sequence[InputFile]) -> None:
    """Warn if nearly every record has a field `text` or `content` beside other strings."""
    if row_options.fields or row_options.format == CHAT:
        return
    records = [record for record in _read_sample(folder, files) if isinstance(record, dict)]
    for name in _FIELDS:
        fields = Fields([name])
        with_text = [
            record for record in records if isinstance(record.get(name), str) and record[name]
        ]
        others = Counter(key for record in with_text for key in fields.find_others(record))
        if len(with_text) < _NEARLY_ALL * max(len(records), 1) or not others:
            continue
        names = units.join_names(sorted(others, key=lambda key: (-others[key], key)), _NAMED)
        log.warn(
            f"{len(with_text):,} of {units.counted(len(records), 'sampled record')} contain a "
            f"field `{name}` beside other strings ({names}). Each row will contain all of them; "
            f"to train on `{name}` alone, run:\n  "
            + commands.as_typed("--fields", name, drop=["--dry-run"])
        )
        return


def _read_sample(folder: Path, files: Sequence[InputFile]) -> Iterator[Any]:
    """Yield the first records of some files, which are spread evenly over the input."""
    named = [file for file in files if file.role != TEST and _has_records(file)]
    step = max(1, units.ceil_div(len(named), _FILES))
    with tempfile.TemporaryDirectory() as scratch:
        for file in islice(named, 0, None, step):
            yield from _read_first(f"{folder}/{file.path}", scratch)


def _has_records(file: InputFile) -> bool:
    kind = kinds.find_suffix(file.path).removeprefix(".")
    return kind.replace("ndjson", "jsonl") in _RECORDS and (
        file.bytes < _LARGEST_FILE or kind != "json"
    )


def _read_first(path: str, scratch: str) -> list[Any]:
    """Return the first records of a file; the build reports whatever is wrong with it."""
    from lib.corpus import readers  # imports pyarrow
    from lib.corpus.raw_file import RawFile

    documents = _FirstRecords()
    with suppress(_SampleIsFull, OSError, MemoryError), RawFile(path, scratch=scratch) as raw:
        if raw.kind in _RECORDS:
            readers.read_documents(raw, documents)
    return documents.records


def describe_unused(folder: Path, files: Sequence[InputFile]) -> dict[str, str]:
    """Return the line of the plan about keys of conversations that are not used, {} without any.

    They are counted at the beginning of a few files.
    """
    spans: list[FileSpan] = []
    for file in files:
        is_long = file.bytes > _HEAD_BYTES
        if len(spans) < _HEADS and not (file.role or (is_long and not _is_of_lines(file))):
            size = min(file.bytes, _HEAD_BYTES)
            spans.append(FileSpan(file, size, 0, _HEAD_BYTES if is_long else None))
    if not spans:
        return {}
    tally = Tally()
    options = RowOptions(format=CHAT)
    with (
        name_full_disk(Path(tempfile.gettempdir()), MOVE_TEMPORARY),
        tempfile.TemporaryDirectory() as scratch,
        UnitPool(1) as pool,
    ):
        units_of = [
            WorkUnit(number, (span,), str(folder), scratch, options)
            for number, span in enumerate(spans)
        ]
        for result in pool.run(units_of):
            tally.add(result.tally)
    unused = tally.chat.format_unused()
    read = units.size(sum(span.bytes for span in spans))
    return {label: f"{text} in the first {read}" for label, text in unused.items()}


def _is_of_lines(file: InputFile) -> bool:
    return file.path.lower().endswith((".jsonl", ".ndjson"))
