"""Compute the sets of shingles of rows that are candidates, from the parts or shards with them.

The exact Jaccard similarity of two rows needs their sets. Only rows that share a band key with
another row need one, so the sets are computed from the stored text after the keys were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.core import hashing
from lib.corpus import chat_rows, work_units
from lib.corpus.row_options import RowOptions
from lib.curate import shingles
from lib.curate.masks.mask_options import make_masker

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


class SetsTask(NamedTuple):
    """Describes the sets that a worker computes.

    path: a part, or a shard if is_shard is true. digest: of a part. rows: increasing row numbers in
    that file (int64). out: file for the sets. masks: whether to mask the rows first, as the rows of
    earlier datasets are masked.
    """

    path: str
    digest: str
    is_shard: bool
    rows: np.ndarray
    out: str
    row_options: RowOptions
    masks: bool


def prepare_worker() -> Callable[[SetsTask], np.ndarray | None]:
    """Return the function that a worker calls with a task."""
    return write_sets


def write_sets(task: SetsTask) -> np.ndarray | None:
    """Write the set of each row (its distinct hashes, uint64, sorted), and return their sizes.

    Returns None if the part is damaged, because reading it might end the process.
    """
    import numpy as np

    if task.digest and not hashing.has_digest(Path(task.path), task.digest):
        return None
    masker = make_masker(task.row_options) if task.masks else None
    sizes = []
    with Path(task.out).open("wb") as out:
        for texts in _batch_texts(_read_texts(task)):
            if masker:
                texts = list(map(masker.mask_text, texts))
            hashed = shingles.hash_texts(texts, task.row_options.near_words)
            start = 0
            for end in hashed.ends:
                distinct = np.unique(hashed.hashes[start:end])
                out.write(distinct.tobytes())
                sizes.append(len(distinct))
                start = end
    return np.array(sizes, np.int64)


def _batch_texts(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of at most BATCH_CHARACTERS characters; a longer text is alone."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > shingles.BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def _read_texts(task: SetsTask) -> Iterator[str]:
    """Yield the text of each row of a task."""
    import numpy as np

    first = 0
    for batch in _read_batches(task):
        last = first + batch.num_rows
        selected = task.rows[slice(*np.searchsorted(task.rows, [first, last]))] - first
        first = last
        if len(selected):
            yield from read_row_texts(batch, selected)


def read_row_texts(batch: pa.RecordBatch, rows: np.ndarray) -> Iterator[str]:
    """Yield the text of the given rows of a batch; the contents of turns are joined by newlines."""
    if "text" in batch.schema.names:
        column = batch.column("text")
        for row in rows:
            yield column[int(row)].as_py()
        return
    messages = batch.column("messages")
    contents = messages.values.field(chat_rows.CONTENT)
    edges = messages.offsets
    for row in map(int, rows):
        start = edges[row].as_py()
        yield "\n".join(contents.slice(start, edges[row + 1].as_py() - start).to_pylist())


def _read_batches(task: SetsTask) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(task.path) as file:
        if task.is_shard:
            with pa.ipc.open_stream(file) as stream:
                yield from stream
            return
        schema = work_units.make_part_schema(task.row_options)
        while file.tell() < file.size():
            yield pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
