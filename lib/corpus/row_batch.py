"""Define the batches of rows that rules, columns and sidecars read, and the verdicts of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from lib.corpus.tally import Tally

T = TypeVar("T")


class RowText:
    """Contains the text of a row as rules and sidecars see it.

    strings: the text, or the contents of all turns of a conversation. If a text is larger than
    64 MB, this is only its beginning. path: the file, relative to the data folder. source: the
    file, relative to the source directory. characters: number of characters of the whole text
    (default: counted in `strings`). position: number of the row in its file (or in a span of a
    large file), from 1. questions: contents of the user's turns, if the row is a conversation.
    size: bytes of the whole text in UTF-8 (default: counted in `strings`).
    """

    __slots__ = ("_characters", "_size", "_strings", "path", "position", "questions", "source")

    def __init__(
        self,
        strings: Iterable[str],
        path: str = "",
        source: str = "",
        characters: int | None = None,
        position: int = 0,
        questions: Sequence[str] = (),
        size: int | None = None,
    ) -> None:
        self._size = size
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
    def bytes(self) -> int:
        """Return the bytes of the text in UTF-8, newlines between turns not included."""
        if self._size is None:
            self._size = sum(
                len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
                for text in self._strings
            )
        return self._size

    @property
    def is_whole(self) -> bool:
        """Return whether `text` is the whole text."""
        return self._characters in (None, sum(map(len, self._strings)))


class RowBatch:
    """Contains consecutive rows of a work unit, which may come from several files.

    A batch has at most words.BATCH_CHARACTERS characters; a longer row is a batch of its own.

    columns: by name, the values of the columns of selection.py that are on, one per row. Rules can
    read them.
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
        """Return the result of `compute` for this batch. It is called only once per key."""
        if key not in self._computed:
            self._computed[key] = compute(self)
        return self._computed[key]


class RowVerdict(NamedTuple):
    """Contains which rows of a batch a rule drops, and why.

    dropped: bool [rows]. values: the measurement of the rule for each row, or empty. reasons: why
    each row is dropped; empty if the reason is the same for all.
    """

    dropped: np.ndarray
    values: Sequence[float | str | None] = ()
    reasons: Sequence[str] = ()


class BatchRule(NamedTuple):
    """Describes a rule that checks a batch of rows.

    kind: name of the rule in errors.jsonl, dropped.jsonl and the manifest. reason: a text that
    completes the sentences "3 rows are …" and "1 row is …". finish: called after the last row, to
    add the counts of the rule to the tally.
    """

    kind: str
    reason: str
    check: Callable[[RowBatch], RowVerdict]
    finish: Callable[[Tally], None] | None = None
