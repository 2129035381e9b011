# covers: lib/train/data.py
"""Names of tasks and of parts of the validation split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lib.core.errors import UsageError
from lib.train import data


def test_a_task_with_the_name_of_a_source_or_dataset_is_refused() -> None:
    """Called directly, since both would need a suite and a corpus with the same names."""

    def require(tasks: list[str], *parts: tuple[str, list[str]]) -> None:
        data._require_distinct_names(
            SimpleNamespace(
                held_out=[
                    SimpleNamespace(name=name, text=SimpleNamespace(names=sources))
                    for name, sources in parts
                ],
                tasks=[SimpleNamespace(name=name) for name in tasks],
            )
        )

    require(["copying"], ("corpus", ["books", "code"]))
    require(["corpus"], ("corpus", ["books", "code"]))  # one dataset names no figure
    with pytest.raises(UsageError, match="books"):
        require(["books"], ("corpus", ["books", "code"]))
    with pytest.raises(UsageError, match="second"):
        require(["second"], ("first", []), ("second", []))
