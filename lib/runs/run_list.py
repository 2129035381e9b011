"""Find the runs below a directory, and summarise each: status, progress, figures, options."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import records
from lib.runs import run_records
from lib.runs.run_files import RunFiles, RunStatus
from lib.runs.run_records import mean_loss

_DEEPEST = 4  # levels of directories to search below the listed directory
_TAIL = 64 << 10  # bytes to read at the end of metrics.jsonl and events.jsonl
_HEAD = 4 << 10  # bytes to read at the beginning of events.jsonl
# A run has one of these files, and config.yaml.
_RUN_FILES = ("state.json", "metrics.jsonl", "lock.json", "model")
_HIDDEN_OPTIONS = {  # they do not describe the training
    *("experiment_name", "save_dir", "cache_dir", "config", "dry_run"),
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
        _read_changed_options(run),
    )


def _read_changed_options(run: RunFiles) -> dict[str, Any]:
    """Return the options of a run that were typed and are not the defaults, by field.

    config.yaml records the defaults of these options; that of an older version does not.
    """
    content = run_records.read_config(run.experiment)
    values = content.get("options", {})
    hidden = {*content.get("settled", {}), *_HIDDEN_OPTIONS}
    changed = content.get("defaults", {})
    return {name: values[name] for name in changed if name in values and name not in hidden}


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
