"""What a run tells of its steps: rows, console lines, rank logs, the bar and the plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from lib.core import log, units
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.tokens.batches import MicroBatch
from lib.train import console, metrics
from lib.train.config import Config
from lib.train.metrics import Metrics
from lib.train.outlook import MEASURED
from lib.train.plan import Plan
from lib.train.timers import Pace

_WORTH_TELLING_S = 60.0
_ON_BAR = ("loss", "validation", "eta")


class Report:
    """Rank 0 speaks for all ranks; each rank has its own figures in its log."""

    def __init__(self, config: Config, experiment: Experiment, plan: Plan, rank: int, step: int,
                 caption: str) -> None:
        """step: where the run goes on. caption: what a reader of loss.png alone must know."""
        self._style, self._experiment, self._plan = config.log_style, experiment, plan
        self._rank, self._caption = rank, caption
        self._metrics = Metrics(experiment, rank, step, config.wandb)
        self._plot_may_fail = log.Tolerated(experiment.plot.name, Exception, done="drawn")
        self._lines, self._pace = console.Lines(plan.total_steps), Pace()
        self._bar = Progress("training", plan.total_steps, "step", done=step, times=False,
                             enabled=not config.no_progress and sys.stderr.isatty())
        self._said: dict[str, str] = {}
        self._began = time.monotonic()

    def step_done(self, step: int) -> None:
        """Count a step of this launch."""
        self._pace.step_done()
        self._bar.advance()
        if (seconds := self._pace.seconds_per_step) is not None:
            left = self._plan.total_steps - step
            self._tell_bar(eta=units.duration(left * seconds))
            if self._pace.steps == MEASURED and left * seconds > _WORTH_TELLING_S:
                self._tell_duration(left)

    def _tell_duration(self, left: int) -> None:
        """Say how long the run takes, now that steps have been timed."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # once: until here the host may be ahead
        seconds = self._pace.seconds_per_step or 0.0
        saves = self._plan.config.ckpt_freq * seconds
        log.info(f"measured over {MEASURED - 1} steps: {seconds:.3g} s per step, "
                 f"{self._plan.tokens_per_step / seconds:,.0f} tok/s; the {left:,} steps left take "
                 f"{units.duration(left * seconds)}, with a checkpoint every "
                 f"{units.duration(saves)}")

    def speeds(self, step: int) -> dict[str, float]:
        """Return the speed of the launch, and at that speed the seconds until the end, if any."""
        if (seconds := self._pace.seconds_per_step) is None:
            return {}
        speed, left = self._plan.tokens_per_step / seconds, self._plan.total_steps - step
        return {"perf/run_tokens_per_sec": speed} | ({"perf/eta_sec": left * seconds} if left
                                                     else {})

    def launch(self) -> str:
        """Return in words what this launch did, and how fast."""
        seconds, steps = self._pace.seconds_per_step, self._pace.steps
        speed = f", {self._plan.tokens_per_step / seconds:,.0f} tok/s after the first" \
            if seconds else ""
        return f"this launch: {steps:,} step{'s' * (steps != 1)} in " \
               f"{units.duration(time.monotonic() - self._began)}{speed}"

    def row(self, row: dict[str, Any]) -> None:
        """Write a row: of rank 0 everywhere, of another rank in its log."""
        self._metrics.write(row)
        record = console.record(row, self._rank)
        log.to_file(record)
        log.to_console(record if self._style == "dict" else self._lines.line(row))
        self._tell_bar(loss=f"{row['train/loss_mean']:.3f}")

    def validating(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the batches of a validation and count them behind the bar."""
        for number, batch in enumerate(batches, 1):
            self._bar.tell(f"validation, batch {number:,}")
            yield batch

    def validated(self, step: int, loss: float, began: float) -> None:
        """Print a validation loss. began: by time.monotonic()."""
        log.info(f"step {step:,}: validation loss {loss:.4f}, in "
                 f"{units.duration(time.monotonic() - began)}")
        self._tell_bar(validation=f"{loss:.3f}")

    def rewind(self, step: int) -> None:
        """Drop what was logged after a step: the steps that follow it are run again."""
        self._metrics.rewind(step)
        self._bar.advance(step - self._bar.done)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the run that have a training loss, as far as they can be read."""
        with suppress(OSError):
            return [row for row in metrics.read(self._experiment.metrics) if "train/loss" in row]
        return []

    def draw(self) -> None:
        """Draw loss.png; rank 0 alone, in any thread."""
        if self._rank == 0:
            with self._plot_may_fail:
                self._metrics.curve.draw(self._experiment.plot, self._caption)

    def close_bar(self) -> None:
        """Take the bar away: no more steps come."""
        self._bar.close()

    def close(self) -> None:
        """Take the bar away and flush all files."""
        self._bar.close()
        self._metrics.close()

    def _tell_bar(self, **said: str) -> None:
        """Show the last words of each kind behind the bar."""
        self._said |= said
        self._bar.tell(", ".join(f"{kind} {self._said[kind]}" for kind in _ON_BAR
                                 if kind in self._said))
