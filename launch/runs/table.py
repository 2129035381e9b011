"""Format the table of runs: status, progress, loss, speed, last change, and their options."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Group, JustifyMethod, OverflowMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.runs.curves import supports_unicode
from lib.core import units
from lib.core.errors import one_line
from lib.runs.run_list import RunSummary

_LONGEST_NAME = 32
_MOST_SKIPPED = 10


def render_table(runs: list[RunSummary], skipped: list[str]) -> Group:
    """Return the table of runs, for a single run without the column of options."""
    shared = _find_shared_options(runs)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    columns = {
        "run": [shorten_text(one_line(run.name), _LONGEST_NAME) for run in runs],
        "status": [run.status.word for run in runs],
        "step": [_format_step(run) for run in runs],
        "loss": [f"{run.loss:.4f}" if "train/loss" in run.figures else "" for run in runs],
        "tok/s": [_format_speed(run) for run in runs],
        "last change": [_format_age(run.updated) for run in runs],
    }
    for name, cells in columns.items():
        # A terminal that is too narrow cuts the line off, not each cell.
        widest = max(map(cell_len, [name, *cells]))
        justify: JustifyMethod = "right" if name in ("step", "loss", "tok/s") else "left"
        table.add_column(name, justify=justify, no_wrap=True, min_width=widest)
    # This column alone becomes narrower than its text.
    overflow: OverflowMethod = "ellipsis" if supports_unicode() else "crop"
    if len(runs) > 1:
        table.add_column(Text("options that differ", no_wrap=True, overflow=overflow))
    for run, *row in zip(runs, *columns.values(), strict=True):
        chosen = {key: value for key, value in run.options.items() if key not in shared}
        options = Text(_format_options(chosen), no_wrap=True, overflow=overflow)
        table.add_row(*row, *([options] if len(runs) > 1 else []))
    notes = [f"all: {_format_options(shared)}"] if shared else []
    if skipped:
        names = units.join_names([one_line(name) for name in skipped], _MOST_SKIPPED)
        notes.append(f"skipped, no runs: {names}")
    return Group(table, *(Padding(note, (1, 0, 0, 0)) for note in notes))


def _find_shared_options(runs: list[RunSummary]) -> dict[str, Any]:
    """Return the options that all runs share, {} for a single run."""
    if len(runs) < 2:
        return {}
    return {
        key: value
        for key, value in runs[0].options.items()
        if all(run.options.get(key) == value for run in runs)
    }


def _format_step(run: RunSummary) -> str:
    if not run.total_steps:
        return f"{run.step:,}" if run.step else ""
    return f"{run.step:,}/{run.total_steps:,} {100 * run.step / run.total_steps:3.0f} %"


def _format_speed(run: RunSummary) -> str:
    speed = run.figures.get("perf/tokens_per_sec", math.nan)
    return f"{speed:,.0f}" if math.isfinite(speed) else ""


def _format_age(moment: float) -> str:
    """Return the age of a moment in one unit, or its date if it is more than a week ago."""
    age = time.time() - moment
    if not moment:
        return ""
    for unit, seconds, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 24), ("d", 86400, 8)):
        if age < most * seconds:
            return f"{max(0, int(age // seconds))} {unit} ago"
    return time.strftime("%Y-%m-%d", time.localtime(moment))


def _format_options(values: dict[str, Any]) -> str:
    return ", ".join(f"{one_line(key)} {format_value(value)}" for key, value in values.items())


def format_value(value: Any) -> str:
    """Return the value of an option: paths by their last part, lists with commas."""
    if isinstance(value, list):
        return "+".join(map(format_value, value))
    if isinstance(value, str):
        return one_line(value.rstrip("/").rpartition("/")[2] or value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else one_line(value)


def shorten_text(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with … in its middle."""
    if len(text) <= most:
        return text
    mark = "…" if supports_unicode() else "~"
    head = (most - 1) // 2
    return text[:head] + mark + text[len(text) - (most - 1 - head) :]
