"""Drop rows by a function of the user's: `--step my_filter.py`.

The file defines `NAME`, the name of the rule, and `find_reason(text)`, which returns why a text is
dropped, or "" to keep it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.core import commands, hashing
from lib.core.declared import option
from lib.core.errors import UsageError
from lib.curate.rows import RowBatch
from lib.curate.step import Counts, CurationStep, RuleVerdict, StepResult

_MOST_REASON = 200  # characters of a reason that are kept
_EXAMPLE = 'NAME = "no code", and find_reason(text), which returns a reason or ""'


@dataclass(frozen=True)
class OwnFilterOptions:
    """Declares the option of filters of the user's own."""

    step: list[Path] = option(
        [],
        group="own filters",
        parse=Path,
        metavar="FILE",
        only_typed=True,
        help="a Python file with a filter of your own: `NAME`, the name of the rule, and "
        "`find_reason(text)`, which returns why a text is dropped, or '' to keep it; may be "
        "repeated; only typed, never read from a --config (default: none)",
    )


@dataclass(frozen=True)
class OwnFilters(CurationStep):
    """Drops rows by functions of the user's. names: the rules, by file."""

    names: dict[Path, str]

    name = "own filters"
    options = OwnFilterOptions

    @classmethod
    def from_options(cls, chosen: OwnFilterOptions) -> OwnFilters | None:
        """Return the step, None without files. Raises UsageError if a file defines no filter."""
        names = {path: load_filter(path)[0] for path in chosen.step}
        if len({*names.values()}) < len(names):
            raise UsageError(
                "--step: two filters have the same NAME",
                found=", ".join(f"{path}: {name}" for path, name in names.items()),
            )
        return cls(names) if names else None

    def identify(self) -> dict[str, Any]:
        """Return the name and the content of each filter, in their order."""
        return {
            "step": [f"{name} {hashing.file_digest(path)}" for path, name in self.names.items()]
        }

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about own filters."""
        return {"own filters": ", ".join(f"{n} ({path})" for path, n in self.names.items())}

    def list_rules(self) -> dict[str, str]:
        """Return the names of the filters."""
        return {name: f"--step {path.name}" for path, name in self.names.items()}

    def start(self) -> RunningFilters:
        """Return what calls the functions."""
        return RunningFilters([load_filter(path) for path in self.names])


class RunningFilters:
    """Calls the functions of filters with each text."""

    def __init__(self, filters: list[tuple[str, Callable[[str], str]]]) -> None:
        self._filters = filters

    def run(self, batch: RowBatch) -> StepResult:
        """Return which rows each filter drops, and its reasons."""
        import numpy as np

        verdicts = []
        for name, find_reason in self._filters:
            reasons = [_call_filter(name, find_reason, text) for text in batch.texts]
            verdicts.append(RuleVerdict(name, np.array([*map(bool, reasons)], bool), reasons))
        return StepResult(verdicts)

    def count(self) -> Counts:
        """Return nothing beyond what is counted for every rule."""
        return {}


def _call_filter(name: str, find_reason: Callable[[str], str], text: str) -> str:
    """Return the reason. Raises UsageError if the function fails or returns something else."""
    try:
        reason = find_reason(text)
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"--step: the filter {name!r} fails on a text of {len(text):,} characters",
            found=f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})",
        ) from None
    if not isinstance(reason, str):
        raise UsageError(
            f"--step: the filter {name!r} does not return a text",
            expected="a reason, or '' to keep the row",
            found=repr(reason),
        )
    return reason[:_MOST_REASON]


def load_filter(path: Path) -> tuple[str, Callable[[str], str]]:
    """Return the name and the function of a filter. Raises UsageError if the file has none."""
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    before = {*sys.modules}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    except OSError as error:
        raise UsageError(f"--step {path}: {error.strerror}") from None
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"--step {path} cannot be run", found=found) from None
    _require_alone(path, [module for name, module in sys.modules.items() if name not in before])
    name = namespace.get("NAME")
    function = namespace.get("find_reason")
    if not (isinstance(name, str) and name.strip() and name.isprintable() and callable(function)):
        raise UsageError(f"--step {path} defines no filter", expected=_EXAMPLE)
    return name, function


def _require_alone(path: Path, imported: Iterable[ModuleType]) -> None:
    """Raise UsageError if a filter has imported a file beside it.

    The identity of the dataset does not cover such a file, and other machines may lack it.
    """
    places = (Path.cwd(), path.resolve().parent)
    installed = (Path(sys.prefix), Path(sys.base_prefix), commands.ROOT / "lib")
    for module in imported:
        file = Path(getattr(module, "__file__", None) or sys.prefix)
        is_beside = any(file.is_relative_to(place) for place in places)
        if is_beside and not any(file.is_relative_to(place) for place in installed):
            raise UsageError(
                f"--step {path} imports {module.__name__}, which is not an installed package",
                found=str(file),
                expected="a filter in one file",
            )
