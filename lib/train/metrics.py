"""Figures of a run: metrics.jsonl and TensorBoard, written by rank 0 alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, records
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.train import journal
from lib.train.console import mean_loss


class Metrics:
    """Appends one JSON object per logged step; figures are not rounded."""

    def __init__(self, experiment: Experiment, rank: int, step: int, wandb: bool = False) -> None:
        """step: where the run goes on; what an interrupted run logged after it is dropped."""
        self._active, self._experiment = rank == 0, experiment
        if self._active:
            self._open(step)
            self._wandb = _wandb(experiment) if wandb else None

    def rewind(self, step: int) -> None:
        """Drop what was logged after a step: the steps that follow it are run again."""
        if self._active:
            self._close_files()
            self._open(step)

    def write(self, figures: dict[str, Any]) -> None:
        """Write the figures of `figures["step"]` with the time."""
        if not self._active:
            return
        with journal.told("a line of metrics.jsonl"):
            self._file.write(_line({"step": figures["step"], "time": journal.now(), **figures}))
        if self._board is not None:
            for key, value in figures.items():
                if isinstance(value, (int, float)) and key != "step":
                    self._board.add_scalar(key, value, figures["step"])
        if self._wandb is not None:
            self._wandb.log(figures, step=figures["step"])

    def close(self) -> None:
        """Flush all sinks."""
        if self._active:
            self._close_files()
            if self._wandb is not None:
                self._wandb.finish()

    def _open(self, step: int) -> None:
        _cut(self._experiment.metrics, step)
        self._file = self._experiment.metrics.open("a", encoding="utf-8", buffering=1)
        self._board = _tensorboard(self._experiment.tensorboard, step)

    def _close_files(self) -> None:
        with journal.told("metrics.jsonl"):
            self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the logged objects, NaN for what was not finite; lines torn by a crash are left out.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = records.parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append({key: math.nan if value is None else value for key, value in row.items()})
    return rows


def training(rows: list[dict[str, Any]]) -> str:
    """Return the first and the last training loss in words."""
    first, last = rows[0], rows[-1]
    since = f", the mean since step {rows[-2]['step']:,}" if len(rows) > 1 else ""
    return f"{first['train/loss']:.4f} at step {first['step']:,} → {mean_loss(last):.4f} at step " \
           f"{last['step']:,}{since}"


def last_validation(rows: list[dict[str, Any]]) -> str:
    """Return the last validation loss in words."""
    losses = [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
    if not losses:
        return "not measured (no validation split, or one shorter than a sample)"
    return f"{losses[-1][1]:.4f} at step {losses[-1][0]}"


def _cut(path: Path, step: int) -> None:
    """Drop the lines after `step`: the steps they tell of are about to be run again."""
    rows = read(path)
    kept = [_line(row) for row in rows if row["step"] <= step]
    if path.exists():
        manifest.write_text(path, "".join(kept))


def _line(figures: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl; JSON knows no NaN, so what is not finite becomes null."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value
             for key, value in figures.items()}
    return json.dumps(plain) + "\n"


def _tensorboard(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warn("no TensorBoard files: the package `tensorboard` is not installed")
        return None
    return SummaryWriter(str(directory), purge_step=step + 1)


def _wandb(experiment: Experiment) -> Any:
    try:
        import wandb
    except ImportError:
        raise UsageError("--wandb needs the package wandb",
                         run=commands.pip_install("wandb")) from None
    name = experiment.root.name
    return wandb.init(mode="offline", dir=str(experiment.root), project="pretraining", name=name,
                      id=name, resume="allow")
