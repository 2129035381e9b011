"""List all runs of a directory: status, progress, loss, speed, last change, and their options."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Group, JustifyMethod, OverflowMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.runs.curves import supports_unicode
from launch.runs.run_files import RunFiles, RunStatus
from lib.core import declared, options, records, units
from lib.core.errors import one_line
from lib.runs import run_records
from lib.runs.run_records import mean_loss
from lib.train.config import DEFAULTS, Config

_DEEPEST = 4  # levels of directories to search below the listed directory
_TAIL = 64 << 10  # bytes to read at the end of metrics.jsonl and events.jsonl
_HEAD = 4 << 10  # bytes to read at the beginning of events.jsonl
_LONGEST_NAME = 32
_MOST_SKIPPED = 10
# A run has one of these files, and config.yaml.
_RUN_FILES = ("state.json", "metrics.jsonl", "lock.json", "model")
_HIDDEN_OPTIONS = {  # they do not describe the training
    *("experiment_name", "save_dir", "checkpoint_dir", "cache_dir", "config", "dry_run"),
    *("overwrite", "num_workers", "no_progress", "resume"),
    *("resume_with_changes", "log_style", "prepare_only", "plan_only_warn"),
}


class RunSummary(NamedTuple):
    """The facts about a run in the table.

    started, updated: seconds since 1970, 0 if unknown. options: the typed options whose value is
    not the default.
    """

    name: str
    path: Path
    status: RunStatus
    step: int
    total_steps: int | None
    figures: dict[str, Any]
    ranks: int
    started: float
    updated: float
    options: dict[str, Any]

    @property
    def loss(self) -> float:
        """Return the mean training loss of the last row, NaN without a row."""
        return mean_loss(self.figures) if "train/loss" in self.figures else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the summary as values for JSON; unknown numbers are null."""
        figures = {
            key: self.figures.get(name)
            for key, name in (
                ("tokens", "train/tokens_seen"),
                ("validation_loss", "eval/loss"),
                ("tokens_per_sec", "perf/tokens_per_sec"),
                ("samples_per_sec", "perf/samples_per_sec"),
                ("mfu", "perf/mfu"),
                ("peak_gib", "memory/max_peak_gib"),
            )
        }
        values = {
            "name": self.name,
            "path": str(self.path),
            "status": self.status.word,
            "status_text": self.status.text,
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            **figures,
            "ranks": self.ranks or None,
            "started": run_records.format_time(self.started) if self.started else None,
            "updated": run_records.format_time(self.updated) if self.updated else None,
            "options": self.options,
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def find_runs(directory: Path) -> tuple[list[Path], list[str]]:
    """Return the runs below a directory, and the names of the other directories."""
    runs: list[Path] = []
    skipped: list[str] = []
    seen: set[tuple[int, int]] = set()  # links may lead in a circle

    def search(parent: Path, name: str, levels: int) -> bool:
        """Search a directory, and return whether it contains a run. name: relative path."""
        try:
            status = parent.stat()
            if (status.st_dev, status.st_ino) in seen:
                return True
            seen.add((status.st_dev, status.st_ino))
            children = _list_directories(parent)
        except OSError as error:
            skipped.append(f"{name} ({error.strerror})")
            return True
        has_run = False
        others = []
        for child in children:
            child_name = f"{name}/{child.name}".lstrip("/")
            if is_run(child):
                runs.append(child)
                has_run = True
            elif levels and search(child, child_name, levels - 1):
                has_run = True
            else:
                has_parts = any((child / part).exists() for part in _RUN_FILES[:3])
                others.append(f"{child_name} (no config.yaml)" if has_parts else child_name)
        if has_run or not name:
            skipped.extend(others)
        return has_run

    search(directory, "", _DEEPEST)
    return runs, skipped


def _list_directories(directory: Path) -> list[Path]:
    """Return the directories in a directory, except hidden ones, sorted by name."""
    with os.scandir(directory) as entries:
        return sorted(
            directory / entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()
        )


def is_run(directory: Path) -> bool:
    """Return whether stage 04 has written a directory."""
    try:
        has_config = (directory / "config.yaml").is_file()
        names = _RUN_FILES if has_config else ("lock.json",)
        return any((directory / name).exists() for name in names)
    except OSError:  # the directory cannot be read
        return False


def summarise_run(path: Path, name: str) -> RunSummary:
    """Return the summary of a run. Reads only the end of its long files."""
    run = RunFiles(path, _TAIL)
    run.update()
    figures: dict[str, Any] = run.rows[-1] if run.rows else {}
    if run.evaluations:
        figures = {"eval/loss": run.evaluations[-1]["eval/loss"], **figures}
    return RunSummary(
        name,
        path,
        run.status(),
        max(run.state.get("step", 0), figures.get("step", 0)),
        run.state.get("total_steps"),
        figures,
        run.ranks(),
        _find_start(run),
        _find_last_change(run),
        read_options(run.experiment.root),
    )


def read_options(root: Path) -> dict[str, Any]:
    """Return the options of a run that were typed and are not the defaults, by field."""
    content = run_records.read_config(RunFiles(root).experiment)
    settled = content.get("settled", {})
    defaults = options.to_plain_values(options.Options(**vars(DEFAULTS)))
    values = content.get("options", {})
    return {
        field.name: values[field.name]
        for field in declared.list_fields(Config)
        if field.name in values
        and field.name not in {*settled, *_HIDDEN_OPTIONS}
        and values[field.name] != defaults.get(field.name)
    }


def _find_start(run: RunFiles) -> float:
    """Return when the first launch started to train, in seconds since 1970; 0 if unknown."""
    with suppress(OSError), records.open_regular(run.experiment.events) as file:
        row = run_records.parse_row(file.read(_HEAD).partition(b"\n")[0])
        return run_records.parse_time((row or {}).get("time", ""))
    return 0.0


def _find_last_change(run: RunFiles) -> float:
    """Return when the run last wrote a row or its state; 0 if it never did."""
    times = [0.0]
    for path in (run.experiment.state, run.experiment.metrics, run.experiment.config):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def list_runs(directory: Path) -> tuple[list[RunSummary], list[str]]:
    """Return the summaries of the runs below a directory, and the names of skipped directories.

    Active runs come first, then the runs that changed most recently.
    """
    paths, skipped = find_runs(directory)
    summaries = [summarise_run(path, os.path.relpath(path, directory)) for path in paths]
    summaries.sort(key=lambda run: (not run.status.is_held, -run.updated, run.name))
    return summaries, skipped


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
