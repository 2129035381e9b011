"""Contain the rows that rules, columns and sidecars look at: one row, or a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class RowText:
    """The text of a row as rules and sidecars see it.

    strings: the text, or the contents of all turns of a conversation. If a text is larger than
    memory, only its beginning is given. path: of the file, in the data folder. source: the path of
    the file in the source. characters: length of the whole text (default: of strings). position:
    number of the row in its file (or in a span of a large file), from 1. questions: contents of the
    turns of the user, if the row is a conversation.
    """

    __slots__ = ("_characters", "_strings", "path", "position", "questions", "source")

    def __init__(
        self,
        strings: Iterable[str],
        path: str = "",
        source: str = "",
        characters: int | None = None,
        position: int = 0,
        questions: Sequence[str] = (),
    ) -> None:
        self._strings = list(strings)
        self._characters = characters
        self.path = path
        self.source = source
        self.position = position
        self.questions = questions

    @property
    def text(self) -> str:
        """Return the text; the contents of turns are joined by newlines."""
        return "\n".join(self._strings)

    @property
    def characters(self) -> int:
        """Return the number of characters, newlines between turns not included."""
        return sum(map(len, self._strings)) if self._characters is None else self._characters

    @property
    def is_whole(self) -> bool:
        """Return whether `text` is the whole text."""
        return self._characters in (None, sum(map(len, self._strings)))


class RowBatch:
    """Consecutive rows of a work unit, which may be from several files.

    They have at most shingles.BATCH_CHARACTERS characters together; a longer row is alone.

    columns: the values of the columns of selection.py that are on, one per row. Rules can read
    them.
    """

    def __init__(self, rows: Sequence[RowText]) -> None:
        self.rows = rows
        self.columns: dict[str, Sequence[Any]] = {}
        self._computed: dict[str, Any] = {}

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each row."""
        return [row.text for row in self.rows]

    def memo(self, key: str, compute: Callable[[RowBatch], T]) -> T:
        """Return what `compute` returns for this batch; it is called once per key."""
        if key not in self._computed:
            self._computed[key] = compute(self)
        return self._computed[key]
