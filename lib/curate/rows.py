"""Define the rows that the steps of a curation read, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from lib.core.data_names import TRAIN

T = TypeVar("T")


class Row(NamedTuple):
    """Contains a row as the steps see it.

    number: of the row in its split, from 0. source: value of the column `source`, "" without one.
    strings: the text, or the contents of all turns of a conversation. If a text is larger than
    LARGE_BYTES (reader.py), this is only its beginning. characters: of the whole text, newlines
    between turns not included. digest: SHA-256 of the content. questions: contents of the user's
    turns, if the row is a conversation.
    """

    number: int
    source: str
    strings: Sequence[str]
    characters: int
    digest: bytes
    questions: Sequence[str] = ()

    @property
    def text(self) -> str:
        """Return the text; the contents of turns are joined by newlines."""
        return "\n".join(self.strings)

    @property
    def is_whole(self) -> bool:
        """Return whether `text` is the whole text."""
        return self.characters == sum(map(len, self.strings))


class RowBatch:
    """Contains consecutive rows of one split.

    A batch has at most words.BATCH_CHARACTERS characters; a longer row is a batch of its own.

    columns: by name, the values of columns of the input that steps read (`list_inputs`), and of
    those that earlier steps have added, one per row.
    """

    def __init__(
        self, rows: Sequence[Row], columns: Mapping[str, Sequence[Any]], split: str = TRAIN
    ) -> None:
        self.rows = rows
        self.split = split
        self.columns = dict(columns)
        self._computed: dict[str, Any] = {}

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each row."""
        return [row.text for row in self.rows]

    def memo(self, key: str, compute: Callable[[RowBatch], T]) -> T:
        """Return the result of `compute` for this batch. It is called only once per key."""
        if key not in self._computed:
            self._computed[key] = compute(self)
        return self._computed[key]
