"""Read a dataset of text or conversations unit by unit, for the passes of a curation.

A unit is a run of record batches of one shard, with about 16 MB of rows. The division into units
depends on the dataset only. Validation rows come first, so that a training row that repeats one of
them is a later row, and is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core.conversation import CALLS, TEMPLATE_KWARGS, TEXTS
from lib.core.data_names import TRAIN, VALIDATION
from lib.core.errors import ArtifactError
from lib.corpus import json_data
from lib.curate.row_texts import list_sources
from lib.curate.rows import Row, RowBatch
from lib.curate.words import BATCH_CHARACTERS
from lib.tokens import columns
from lib.tokens.columns import CHAT
from lib.tokens.dataset import Dataset, open_dataset

if TYPE_CHECKING:
    import pyarrow as pa

UNIT_BYTES = 16_000_000
LARGE_BYTES = 64_000_000  # of a longer text, the steps see only the beginning
_BEGINNING = 1 << 20  # bytes
_SPLITS = (VALIDATION, TRAIN)  # in the order of the units


@dataclass(frozen=True)
class Unit:
    """Describes the rows of a dataset that a worker reads in one task.

    number: of the unit. shard: its file. batch, batches: the first record batch, and how many.
    first: number of the first row in its split. start: number of the first row in the curation.
    rows, bytes: size of the unit. format: TEXT or CHAT.
    """

    number: int
    split: str
    shard: Path
    batch: int
    batches: int
    first: int
    start: int
    rows: int
    bytes: int
    format: str

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches. Raises ArtifactError if the shard is damaged."""
        batches = columns.read_batches([self.shard], mapped=True)
        yield from islice(batches, self.batch, self.batch + self.batches)

    def read_rows(self, names: Sequence[str] = ()) -> Iterator[RowBatch]:
        """Yield the rows, in batches of at most BATCH_CHARACTERS characters or of one row.

        names: columns whose values the batches contain, where they exist.
        """
        number = self.first
        for batch in self.read():
            known = [name for name in names if name in batch.schema.names]
            values = {name: columns.list_values(batch.column(name)) for name in known}
            first = 0
            for rows in _group_rows(_list_rows(batch, number, self.format)):
                last = first + len(rows)
                own_columns = {name: column[first:last] for name, column in values.items()}
                yield RowBatch(rows, own_columns, self.split)
                first = last
            number += batch.num_rows


@dataclass(frozen=True)
class SourceDataset:
    """A dataset to curate, divided into units."""

    dataset: Dataset
    units: list[Unit]

    @property
    def rows(self) -> int:
        """Return the number of rows of all splits."""
        return sum(unit.rows for unit in self.units)

    @property
    def validation_rows(self) -> int:
        """Return the number of rows of the split `validation`, which come first."""
        return sum(unit.rows for unit in self.units if unit.split == VALIDATION)

    @property
    def bytes(self) -> int:
        """Return the bytes of all units."""
        return sum(unit.bytes for unit in self.units)

    def has_column(self, name: str) -> bool:
        """Return whether all shards have a column of strings."""
        shards = [shard for shards in self.dataset.splits.values() for shard in shards]
        return all(
            columns.is_string(columns.read_column_types(shard).get(name, "")) for shard in shards
        )

    @property
    def splits(self) -> list[str]:
        """Return the names of the splits, in the order of the units."""
        return [name for name in _SPLITS if name in self.dataset.splits]


def open_source(path: Path) -> SourceDataset:
    """Open a dataset and divide it into units. Raises the errors of `open_dataset`."""
    dataset = open_dataset(path)
    units: list[Unit] = []
    start = 0
    for split in _SPLITS:
        first = 0
        for shard in dataset.splits.get(split, ()):
            for batch, batches, rows, size in _cut_shard(shard):
                units.append(
                    Unit(
                        len(units),
                        split,
                        shard,
                        batch,
                        batches,
                        first,
                        start,
                        rows,
                        size,
                        dataset.format,
                    )
                )
                first += rows
                start += rows
    return SourceDataset(dataset, units)


def _cut_shard(shard: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first batch of each unit, and its batches, rows and bytes."""
    first = 0
    rows = 0
    size = 0
    number = 0
    for number, batch in enumerate(columns.read_batches([shard], mapped=True), 1):
        rows += batch.num_rows
        size += batch.nbytes
        if size >= UNIT_BYTES:
            yield first, number - first, rows, size
            first = number
            rows = 0
            size = 0
    if rows:
        yield first, number - first, rows, size


def _group_rows(rows: Iterator[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    characters = 0
    for row in rows:
        if group and characters + row.characters > BATCH_CHARACTERS:
            yield group
            group = []
            characters = 0
        group.append(row)
        characters += row.characters
    if group:
        yield group


def _list_rows(batch: pa.RecordBatch, first: int, content: str) -> Iterator[Row]:
    sources = list_sources(batch)
    read = _list_chats if content == CHAT else _list_texts
    number = first
    try:
        for source, values in zip(sources, read(batch), strict=True):
            yield Row(number, source, *values)
            number += 1
    except UnicodeDecodeError as error:
        raise ArtifactError(
            "the dataset is damaged: a string in it is not UTF-8",
            found=f"row {number:,} of its split: {error}",
        ) from None


def _list_texts(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the strings, characters and digest of each text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = batch.column("text").cast(pa.large_string())
    sizes = pc.fill_null(pc.binary_length(column), 0).to_pylist()
    for number, size in enumerate(sizes):
        value = column[number].as_buffer() if size else b""
        digest = hashlib.sha256(value).digest()
        if size <= LARGE_BYTES:
            text = bytes(value).decode()
            yield [text], len(text), digest
        else:
            # The cut may be inside of a character.
            text = bytes(memoryview(value)[:_BEGINNING]).decode("utf-8", "ignore")
            yield [text], pc.utf8_length(column[number]).as_py(), digest


def _list_chats(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the strings, characters, digest and questions of each conversation."""
    messages = columns.flatten_messages(batch)
    fields = {name: columns.list_values(columns.read_field(messages, name)) for name in TEXTS}
    calls = columns.list_values(columns.read_field(messages, CALLS))
    chats = columns.select_chats(batch)
    tools = columns.list_values(chats.column("tools"))
    kwargs = columns.list_values(chats.column(TEMPLATE_KWARGS))
    edges = columns.find_conversation_edges(batch)
    for number, (start, end) in enumerate(pairwise(edges)):
        turns = [
            {name: values[turn] for name, values in fields.items() if values[turn] is not None}
            | ({CALLS: json_data.load_json(calls[turn])} if calls[turn] else {})
            for turn in range(start, end)
        ]
        content = [turns, json_data.load_json(tools[number]) if tools[number] else None]
        if kwargs[number]:
            content.append(json_data.load_json(kwargs[number]))
        digest = hashlib.sha256(json_data.dump_json(content, is_sorted=True)).digest()
        strings = [turn.get("content", "") for turn in turns]
        questions = [turn.get("content", "") for turn in turns if turn.get("role") == "user"]
        yield strings, sum(map(len, strings)), digest, questions
