"""What a run tells of its steps: rows, console lines, rank logs, the bar and the plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib.core import launcher, log, records, units
from lib.core.errors import DiskFullError, Preempted, from_os_error
from lib.core.events import Event
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.optim.guard import SkippedSteps
from lib.parallel.loss import LossSum
from lib.parallel.routers import RouterLoad
from lib.planning.memory import MemoryEstimate
from lib.tokens.batches import DataStream, MicroBatch
from lib.train import metrics, symptoms
from lib.train.journal import Journal
from lib.train.meters import Meters, Pace
from lib.train.metrics import Metrics
from lib.train.outlook import MEASURED
from lib.train.rows import CapturedRow, Divergence, Evaluation, LossWindow, capture_row, read_row
from lib.train.state import TrainState

_WORTH_TELLING_S = 60.0
_ON_BAR = ("loss", "validation", "eta")
_SHORT = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "lr",
    "eval/loss": "eval_loss",
    "perf/tokens_per_sec": "tok/s",
    "perf/mfu": "mfu",
    "memory/current_gib": "current_gib",
    "memory/peak_gib": "peak_gib",
    "memory/window_peak_gib": "window_peak_gib",
    "memory/reserved_gib": "reserved_gib",
    "memory/total_gib": "total_gib",
    "memory/max_peak_gib": "max_peak_gib",
    "memory/max_peak_rank": "max_peak_rank",
    "perf/loader_share": "loader_share",
    "perf/loader_tokens_per_sec_per_device": "loader_tok/s",
}
_WIDTHS = (10, 9, 11, 8, 8)  # columns of the cells below, until a value is wider
_STRAGGLER = 1.5  # times the usual rank's time before the slowest is named


class Report:
    """Rank 0 speaks for all ranks; each rank has its own figures in its log.

    A row is captured at the end of its step, and written when the device has more to do: meanwhile
    nobody waits for the figures, neither the host for the device nor the device for the host.
    """

    def __init__(
        self,
        experiment: Experiment,
        journal: Journal,
        state: TrainState,
        stream: DataStream,
        meters: Meters,
        estimate: MemoryEstimate,
    ) -> None:
        self._experiment = experiment
        self.journal = journal
        self._state = state
        self._stream = stream
        self._meters = meters
        self._estimate = estimate
        self._plan = state.plan
        self._layout = state.layout
        config = self._plan.config
        rank = self._layout.rank
        steps = self._plan.total_steps
        # What a reader of loss.png alone must know.
        self._caption = (
            f"{experiment.root.name}: {state.model.config.model_type}, "
            f"{self._layout.ranks} × {self._layout.device.type}"
        )
        self._metrics = Metrics(experiment, rank, state.step, config.wandb)
        self._plot_may_fail = log.Tolerated(experiment.plot.name, Exception, done="drawn")
        self._lines = Lines(steps)
        self._pace = Pace()
        self._bar = Progress(
            "training",
            steps,
            "step",
            done=state.step,
            times=False,
            enabled=not config.no_progress and sys.stderr.isatty(),
        )
        self._said: dict[str, str] = {}
        self._captured: CapturedRow | None = None
        self._is_over = False
        self._began = time.monotonic()

    def __enter__(self) -> Report:
        self.note_state("running")
        self._estimate.report()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Write to state.json that the run failed, unless it saved its end, and flush files."""
        if self._captured is not None:
            self._rescue(self._captured)
        if error is not None and not self._is_over:
            known = from_os_error(error) if isinstance(error, OSError) else error
            is_full = isinstance(known, DiskFullError)
            self.note_state("disk_full" if is_full else "failed")
            if not is_full:
                reason = launcher.headline(str(error)) or type(error).__name__
                self.journal.event(Event.FAILED, self._state.step, reason=reason)
        self._bar.close()
        self._metrics.close()

    def _rescue(self, captured: CapturedRow) -> None:
        """Write the row that an error left behind, if no other rank is needed for that."""
        if self._layout.ranks == 1:
            with suppress(Exception):  # the error that ends the run says more
                self.write_captured()
        else:
            log.to_file(
                f"step {captured.step:,} has no row: the ranks had not exchanged their "
                "figures before the error"
            )

    def is_due(self, step: int) -> bool:
        """Tell whether a step's figures are logged: the first, each --log-freq-th, the last."""
        return step % self._plan.config.log_freq == 0 or step in (1, self._plan.total_steps)

    def capture(
        self,
        window: LossWindow,
        routers: RouterLoad,
        grad_norm: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """Note the row of the last step without waiting for the device, which may be behind.

        The row before must have been written. All ranks must call this.
        """
        assert self._captured is None, "the row before is not written yet"
        self._captured = capture_row(
            self._state,
            self._stream,
            self._meters,
            window,
            routers,
            grad_norm,
            learning_rate,
            self._speeds(),
        )

    def add_validation(self, evaluation: Evaluation, model: nn.Module, loss_sum: LossSum) -> None:
        """Measure the validation loss, print it and add it to the row that was captured.

        All ranks must call this.
        """
        assert self._captured is not None, "no row was captured"
        began = time.monotonic()
        figures = evaluation.measure(model, loss_sum, self._show_batches)
        loss = figures["eval/loss"]
        self._captured.validation.update(figures)
        log.info(
            f"step {self._captured.step:,}: validation loss {loss:.4f}, in "
            f"{units.duration(time.monotonic() - began)}"
        )
        self._tell_bar(validation=f"{loss:.3f}")

    def write_captured(self) -> Divergence | None:
        """Write the row that was captured, if any, as soon as the device has done its step.

        Returns where the run has diverged if the row shows that. All ranks must call this. Raises
        UsageError when the loss of the first step is NaN or infinite.
        """
        if (captured := self._captured) is None:
            return None
        self._captured = None
        figures, skipped = read_row(captured, self._plan, self._layout, self._stream, self._meters)
        self._write(figures, captured.ended, skipped)
        if skipped.in_a_row < self._plan.config.rollback_after:
            return None
        return Divergence(captured.step, captured.position, skipped.in_a_row)

    def _write(self, figures: dict[str, Any], ended: float, skipped: SkippedSteps) -> None:
        """Write a step's row everywhere, and say how many steps were skipped before it."""
        state = self._state
        config = self._plan.config
        step = figures["step"]
        state.figures = figures
        self._estimate.report()
        self._row(figures, ended)
        symptoms.require_finite(figures["train/loss"], step, config)
        if skipped.steps:
            why = (
                f"the gradient norm was NaN or infinite in {skipped.steps - skipped.spikes}, "
                f"and over {config.spike_factor:g} times the usual in {skipped.spikes}"
            )
            self.journal.event(Event.SKIP_STEP, step, steps=skipped.steps, reason=why)
            log.warn(f"{skipped.steps} of the last steps left the weights as they were: {why}")

    def step_done(self) -> None:
        """Count a step of this launch."""
        self._pace.step_done()
        self._bar.advance()
        if (seconds := self._pace.seconds_per_step) is not None:
            left = self._plan.total_steps - self._state.step
            self._tell_bar(eta=units.duration(left * seconds))
            if self._pace.steps == MEASURED and left * seconds > _WORTH_TELLING_S:
                self._tell_duration(left)

    def _tell_duration(self, left: int) -> None:
        """Say how long the run takes, now that steps have been timed."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # once: until here the host may be ahead
        seconds = self._pace.seconds_per_step or 0.0
        saves = self._plan.config.ckpt_freq * seconds
        log.info(
            f"measured over {MEASURED - 1} steps: {seconds:.3g} s per step, "
            f"{self._plan.tokens_per_step / seconds:,.0f} tok/s; the {left:,} steps left take "
            f"{units.duration(left * seconds)}, with a checkpoint every "
            f"{units.duration(saves)}"
        )

    def _speeds(self) -> dict[str, float]:
        """Return the speed of the launch, and at that speed the seconds until the end, if any."""
        if (seconds := self._pace.seconds_per_step) is None:
            return {}
        speed = self._plan.tokens_per_step / seconds
        left = self._plan.total_steps - self._state.step
        return {"perf/run_tokens_per_sec": speed} | (
            {"perf/eta_sec": left * seconds} if left else {}
        )

    def _launch(self) -> str:
        """Return in words what this launch did, and how fast."""
        seconds = self._pace.seconds_per_step
        steps = self._pace.steps
        speed = (
            f", {self._plan.tokens_per_step / seconds:,.0f} tok/s after the first"
            if seconds
            else ""
        )
        return (
            f"this launch: {units.counted(steps, 'step')} in "
            f"{units.duration(time.monotonic() - self._began)}{speed}"
        )

    def _row(self, row: dict[str, Any], ended: float) -> None:
        """Write a row: of rank 0 everywhere, of another rank in its log."""
        self._metrics.write(row, ended)
        record = format_record(row, self._layout.rank)
        log.to_file(record)
        log.to_console(record if self._plan.config.log_style == "dict" else self._lines.line(row))
        self._tell_bar(loss=f"{row['train/loss_mean']:.3f}")

    def _show_batches(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the batches of a validation and count them behind the bar."""
        for number, batch in enumerate(batches, 1):
            self._bar.show(f"validation, batch {number:,}")
            yield batch

    def rewind(self) -> None:
        """Drop what was logged after the run's step: the steps that follow it are run again."""
        self._metrics.rewind(self._state.step)
        self._bar.advance(self._state.step - self._bar.done)
        self.note_state("running")

    def saved(self) -> Callable[[bool], None]:
        """Return what tells, on rank 0 and in any thread, that this step has been saved."""
        facts = self._facts()

        def tell(is_shared: bool) -> None:
            self.journal.state("running", **facts)
            if is_shared:
                with self._plot_may_fail:
                    self._metrics.curve.draw(self._experiment.plot, self._caption)

        return tell

    def note_stop(self, reason: str) -> None:
        """Note that the run stops after this saved step. Raises Preempted if steps are left."""
        step = self._state.step
        has_ended = self._state.step == self._plan.total_steps
        self.note_state("complete" if has_ended else "preempted")
        self.journal.event(Event.SIGNAL, step, signal=reason)
        if not has_ended:
            again = " without --overwrite" if self._plan.config.overwrite else ""
            raise Preempted(
                f"stopped by {reason} after step {step:,}, which is saved; run the "
                f"same command again{again} to go on"
            )

    def note_state(self, status: str) -> None:
        """Write state.json."""
        self._is_over |= status in ("complete", "preempted")
        self.journal.state(status, **self._facts())

    def _facts(self) -> dict[str, float | None]:
        """Return what state.json reports about this step."""
        state = self._state
        return {
            "step": state.step,
            "global_step": state.step,  # its name in other trainers
            "epoch": self._stream.epoch(state.position),
            "total_steps": self._plan.total_steps,
            "tokens": state.tokens,
            "sample_cursor": state.position.samples,
            "samples": self._plan.samples,
        }

    def finish(self) -> None:
        """Tell how the run ended; the last step has been saved."""
        self._bar.close()
        self.journal.event(Event.COMPLETE, self._state.step)
        if self._layout.rank == 0 and (rows := self._rows()):
            log.info(
                f"done: {self._state.step:,} steps, {rows[-1]['train/tokens_seen']:,} tokens; "
                f"{self._launch()}"
            )
            log.table(
                {
                    "training loss": metrics.training(rows),
                    "validation loss": metrics.last_validation(rows),
                    "memory": self._estimate.compared(
                        self._meters.memory_peak, self._meters.memory_before
                    ),
                    "plot": self._plot(),
                    "metrics": self._experiment.metrics,
                }
            )

    def _plot(self) -> Path | str:
        """Return where the plot of the run is, or in words that there is none of all its steps."""
        if self._experiment.plot.is_file() and not self._plot_may_fail.is_failing:
            return self._experiment.plot
        return "not drawn: a warning above says why"

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows of the run that have a training loss, as far as they can be read."""
        return [
            row for row in records.read_log_rows(self._experiment.metrics) if "train/loss" in row
        ]

    def _tell_bar(self, **said: str) -> None:
        """Show the last words of each kind behind the bar."""
        self._said |= said
        self._bar.show(
            ", ".join(f"{kind} {self._said[kind]}" for kind in _ON_BAR if kind in self._said)
        )


class Lines:
    """Makes the line of each row; columns are as wide as their widest value so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = f"{total_steps:,}"
        self._widths = list(_WIDTHS)

    def line(self, row: dict[str, Any]) -> str:
        """Return a row in under 120 columns; its keys are those of docs/reference/artifacts.md."""
        cells = [
            f"loss {row['train/loss_mean']:.3f}",
            f"lr {_rate(row['train/learning_rate'])}",
            f"{row['perf/tokens_per_sec']:,.0f} tok/s",
            f"{_percent(row['perf/mfu'])} MFU",
            units.memory(row["memory/max_peak_gib"] * (1 << 30)),
        ]
        self._widths = list(map(max, self._widths, map(len, cells)))
        step = f"{row['step']:,}".rjust(len(self._total))
        return "  ".join(
            [f"step {step}/{self._total}", *map(str.rjust, cells, self._widths), *_remarks(row)]
        )


def format_record(row: dict[str, Any], rank: int) -> str:
    """Return a row as `[rank=R] {'global_step': …}`, rounded; times in ms, memory in GiB."""
    found: dict[str, Any] = {
        "global_step": row["step"],
        "running_loss": round(row["train/loss_mean"], 4),
    }
    found |= {short: _short(row[key]) for key, short in _SHORT.items() if key in row}
    found |= {key: round(value, 1) for key, value in row.items() if key.startswith("time/")}
    if row["perf/slowest_ratio"] > _STRAGGLER:
        found["slowest_rank"] = row["perf/slowest_rank"]
    if "perf/eta_sec" in row:
        found["eta"] = units.duration(row["perf/eta_sec"])
    return f"[rank={rank}] {found}"


def _remarks(row: dict[str, Any]) -> list[str]:
    """Return what not every line has."""
    said = []
    if "perf/eta_sec" in row:
        said.append(f"eta {units.duration(row['perf/eta_sec'])}")
    if "perf/loader_share" in row:
        said.append(f"{_percent(row['perf/loader_share'])} waiting for data")
    if row["perf/slowest_ratio"] > _STRAGGLER:
        said.append(f"slowest rank {row['perf/slowest_rank']}")
    return said


def _rate(value: float) -> str:
    """Return a learning rate with two digits: `2.9e-4`."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 or not share else 1}f} %"


def _short(value: float) -> Any:
    """Return four digits of a figure, all of a count or a rank."""
    if isinstance(value, int):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
