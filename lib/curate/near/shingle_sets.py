"""Compute the sets of shingles of rows that are candidates, from the shards with them.

The exact Jaccard similarity of two rows needs their sets. Only rows that share a band key with
another row need one, so the sets are computed from the text after the keys were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.curate import shingles
from lib.curate.near.compared_rows import DocumentRange
from lib.tokens import columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from lib.curate.whole import ChangingStep


class SetsTask(NamedTuple):
    """Describes the sets that a worker computes.

    rows: increasing row numbers after the first batch of the range (int64). out: file for the sets.
    """

    range: DocumentRange
    rows: np.ndarray
    out: Path


class SetsWriter:
    """Computes sets; each worker process has one.

    words: number of words in a shingle. changing: steps that have changed the rows of the earlier
    datasets; the rows of this dataset are changed alike before they are compared.
    """

    def __init__(self, words: int, changing: Sequence[ChangingStep]) -> None:
        self._words = words
        self._changing = [rewriting for step in changing if (rewriting := step.start_rewriting())]

    def __call__(self, task: SetsTask) -> np.ndarray:
        """Write the set of each row (its distinct hashes, uint64, sorted); return their sizes."""
        import numpy as np

        sizes = []
        with task.out.open("wb") as out:
            for texts in _batch_texts(self._read_texts(task)):
                hashed = shingles.hash_texts(texts, self._words)
                start = 0
                for end in hashed.ends:
                    distinct = np.unique(hashed.hashes[start:end])
                    out.write(distinct.tobytes())
                    sizes.append(len(distinct))
                    start = end
        return np.array(sizes, np.int64)

    def _read_texts(self, task: SetsTask) -> Iterator[str]:
        """Yield the text of each row of a task."""
        import numpy as np

        first = 0
        for batch in task.range.read():
            last = first + batch.num_rows
            selected = task.rows[slice(*np.searchsorted(task.rows, [first, last]))] - first
            first = last
            if not len(selected):
                continue
            for text in _list_texts(batch, selected):
                for rewriting in () if task.range.is_earlier else self._changing:
                    text = rewriting.show(text)
                yield text


def prepare_worker(
    words: int, changing: Sequence[ChangingStep]
) -> Callable[[SetsTask], np.ndarray]:
    """Return the function that a worker calls with a task."""
    return SetsWriter(words, changing)


def _list_texts(batch: pa.RecordBatch, rows: np.ndarray) -> Iterator[str]:
    """Yield the text of the given rows of a batch; the contents of turns are joined by newlines."""
    if "text" in batch.schema.names:
        column = batch.column("text")
        for row in rows.tolist():
            yield column[row].as_py() or ""
        return
    contents = columns.read_field(columns.flatten_messages(batch), "content")
    edges = columns.find_conversation_edges(batch)
    for row in rows.tolist():
        start = edges[row]
        yield "\n".join(text or "" for text in contents[start : edges[row + 1]].to_pylist())


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
