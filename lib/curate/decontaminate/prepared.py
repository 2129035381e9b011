"""Extend the options of rows by the index of the test sets, which is built before rows are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from lib.corpus.row_options import InputRowOptions, RowOptions

if TYPE_CHECKING:
    from lib.corpus.row_batch import RowBatch, RowVerdict


@dataclasses.dataclass(frozen=True)
class PreparedOptions(InputRowOptions):
    """The options of rows, and the index of the test sets.

    test_index: directory of the index. counter: the check that replaces the rule while the corpus
    is sampled.
    """

    test_index: str = dataclasses.field(default="", kw_only=True)
    counter: Callable[[RowBatch], RowVerdict] | None = dataclasses.field(default=None, kw_only=True)


def add_index(row_options: RowOptions, test_index: str) -> PreparedOptions:
    """Return the options with the directory of an index."""
    values = {
        field.name: getattr(row_options, field.name)
        for field in dataclasses.fields(InputRowOptions)
        if hasattr(row_options, field.name)
    }
    return PreparedOptions(**values, test_index=test_index)
