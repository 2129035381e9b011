"""Report the steps of a run: rows, console lines, rank logs, the progress bar and the plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import nn

from lib.core import launcher, log, units
from lib.core.errors import DiskFullError, Preempted, from_os_error
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.optim.guard import SkippedSteps
from lib.parallel.loss import LossFunction
from lib.parallel.routers import RouterLoad
from lib.planning.memory import MemoryEstimate
from lib.runs import metrics, row_files
from lib.runs.events import Event
from lib.runs.figures import DEFAULT_SCORE, Status
from lib.runs.journal import Journal
from lib.runs.metrics import Metrics
from lib.tokens.batches import DataStream, MicroBatch
from lib.train.estimates import MEASURED_STEPS
from lib.train.output import bits_per_byte, console, symptoms
from lib.train.output.meters import Meters, Pace
from lib.train.output.page_writer import PageWriter
from lib.train.output.rows import (
    CapturedRow,
    Divergence,
    Evaluation,
    LossWindow,
    capture_row,
    read_row,
)
from lib.train.sampling import SampleFile, Sampling, describe_sample, format_texts, list_texts
from lib.train.state import TrainState

_LONG_RUN_S = 60.0  # remaining time from which the log estimates the duration
_ON_BAR = ("loss", "validation", "eta")


class Report:
    """Reports the steps of a run. Rank 0 reports for all ranks; each rank logs its own figures.

    A row is captured at the end of its step and written after the next step has been launched, so
    neither the host nor the device waits for the figures. keeps_files: whether to write files.
    """

    keeps_files: ClassVar[bool] = True
    rollback_after: ClassVar[int] = 20  # bad steps in a row, for a return to a checkpoint

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
        # People look at loss.png without the run beside it.
        self._caption = (
            f"{experiment.root.name}: {state.model.config.model_type}, "
            f"{self._layout.ranks} × {self._layout.device.type}"
        )
        # The row of a step whose evaluation is still due is written again, with its figures.
        self._held: tuple[dict[str, Any], float] | None = None
        if state.unevaluated:
            self._held = (state.unevaluated, time.time())
        kept_step = state.step - bool(state.unevaluated)
        self._metrics = Metrics(experiment, rank, kept_step, config.wandb, self.keeps_files)
        is_kept = rank == 0 and self.keeps_files
        self._samples = SampleFile(experiment, kept_step, is_kept)
        self._plot_may_fail = log.WarnOnce(experiment.plot.name, Exception, done="drawn")
        self._page = PageWriter(experiment, is_kept)
        self._console_lines = console.ConsoleLines(self._plan.total_steps)
        self._pace = Pace()
        self._bar = Progress(
            "training",
            self._plan.total_steps,
            "step",
            done=state.step,
            times=False,
            enabled=not config.no_progress and sys.stderr.isatty(),
        )
        self._bar_texts: dict[str, str] = {}
        self._captured: CapturedRow | None = None
        self._is_over = False
        self._began = time.monotonic()

    def __enter__(self) -> Report:
        self.note_state(Status.RUNNING)
        self._estimate.report()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Flush all files. After an error, write to state.json that the run failed.

        A run that is complete, or was stopped and saved, keeps that status.
        """
        self.write_held()
        if self._captured is not None:
            self._write_after_error(self._captured)
        if error is not None and not self._is_over:
            cause = from_os_error(error) if isinstance(error, OSError) else error
            is_full = isinstance(cause, DiskFullError)
            self.note_state(Status.DISK_FULL if is_full else Status.FAILED)
            if not is_full:
                reason = launcher.headline(str(error)) or type(error).__name__
                self.journal.add_event(Event.FAILED, self._state.step, reason=reason)
        self._bar.close()
        self._metrics.close()
        self._samples.close()
        if error is not None:
            self._page.start(is_last=True)

    def _write_after_error(self, captured: CapturedRow) -> None:
        """Write the row that was captured before an error, if there are no other ranks."""
        if self._layout.ranks == 1:
            with suppress(Exception):  # the error that ends the run must be reported
                self.write_captured()
        else:
            log.to_file(
                f"step {captured.step:,} has no row: the ranks had not exchanged their "
                "figures before the error"
            )

    def is_due(self, step: int) -> bool:
        """Return whether a step gets a row: the first, each --log-freq-th and the last do."""
        return step % self._plan.config.log_freq == 0 or step in (1, self._plan.total_steps)

    def capture(
        self,
        window: LossWindow,
        routers: RouterLoad,
        grad_norm: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """Capture the row of the last step without waiting for the device, which may be behind.

        The previous row must have been written. All ranks must call this.
        """
        assert self._captured is None, "the previous row is not written yet"
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

    def add_validation(
        self,
        evaluation: Evaluation,
        model: nn.Module,
        compute_loss: LossFunction,
        require_none: Callable[[], object],
    ) -> None:
        """Evaluate what is due at this step, print the figures and add them to the held row.

        require_none: see StopRequest, called between forward passes. All ranks must call this.
        """
        step = self._state.step
        figures = self._state.unevaluated

        def show_batches(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
            for number, batch in enumerate(batches, 1):
                self._bar.show(f"validation, batch {number:,}")
                require_none()
                yield batch

        def show_pass(passes: int) -> None:
            self._meters.watchdog.enter("evaluation")
            require_none()

        if evaluation.is_loss_due(step):
            began = time.monotonic()
            figures |= evaluation.measure(model, compute_loss, show_batches)
            loss = figures["eval/loss"]
            by_text = bits_per_byte.describe_figures(figures)
            log.info(
                f"step {step:,}: validation loss {loss:.4f}, {by_text}{', ' if by_text else ''}in "
                f"{units.duration(time.monotonic() - began)}"
            )
            self._show_on_bar(validation=f"{loss:.3f}")
        if evaluation.suite.is_due(step):
            figures |= evaluation.suite.measure(step, show_pass)
        key = self._plan.config.best_by
        is_missing = key not in figures and key != DEFAULT_SCORE and self._layout.rank == 0
        if step == self._plan.total_steps and is_missing:
            log.warn(
                f"--best-by {key} was not measured in this run; measured: "
                + units.join_names(list(figures), 8)
            )

    def add_samples(self, sampling: Sampling, require_none: Callable[[], object]) -> None:
        """Continue the prompts of the run, and write the samples. All ranks must call this.

        require_none: see StopRequest, called between forward passes.
        """
        state = self._state
        began = time.monotonic()
        samples = sampling.make_samples(state.model, require_none)
        self._samples.write(state.step, state.tokens, samples)
        self._metrics.write_samples(state.step, format_texts(samples), list_texts(samples))
        if samples:
            log.info(
                f"step {state.step:,}: {units.counted(len(samples), 'sample')} in "
                f"{units.duration(time.monotonic() - began)}, such as "
                + describe_sample(samples[0])
            )

    def write_captured(self, hold: bool = False) -> Divergence | None:
        """Write the captured row, if any, once the device has finished the row's step.

        hold: an evaluation follows, so the row waits for `write_held`. Returns the step at
        which the run has diverged, or None. All ranks must call this. Raises UsageError if
        the loss of the first step is NaN or infinite.
        """
        if (captured := self._captured) is None:
            return None
        self._captured = None
        figures, skipped = read_row(captured, self._plan, self._layout, self._stream, self._meters)
        has_diverged = skipped.in_a_row >= self.rollback_after
        self._state.figures = figures
        self._state.unevaluated = figures if hold and not has_diverged else {}
        self._held = (figures, captured.ended)
        if not self._state.unevaluated:
            self.write_held()
        self._check_row(figures, skipped)
        if not has_diverged:
            return None
        return Divergence(captured.step, captured.position, skipped.in_a_row)

    def write_held(self) -> None:
        """Write the row that was held for the figures of an evaluation, if there is one."""
        if self._held is not None:
            figures, ended = self._held
            self._held = None
            self._write_row(figures, ended)

    def _check_row(self, figures: dict[str, Any], skipped: SkippedSteps) -> None:
        """Warn about the steps that were skipped before a row.

        Raises UsageError if the loss of the first step is NaN or infinite.
        """
        config = self._plan.config
        step = figures["step"]
        self._estimate.report()
        symptoms.require_finite(figures["train/loss"], step, config)
        if skipped.steps:
            reason = (
                f"the gradient norm was NaN or infinite in {skipped.steps - skipped.spikes} steps "
                f"and more than {config.spike_factor:g} times the usual norm in {skipped.spikes}"
            )
            self.journal.add_event(Event.SKIP_STEP, step, steps=skipped.steps, reason=reason)
            log.warn(
                f"{units.counted(skipped.steps, 'step')} since the previous row left the weights "
                f"unchanged: {reason}"
            )

    def count_step(self) -> None:
        """Count a step of this launch."""
        self._pace.count_step()
        self._bar.advance()
        if (seconds := self._pace.seconds_per_step) is not None:
            steps_left = self._plan.total_steps - self._state.step
            self._show_on_bar(eta=units.duration(steps_left * seconds))
            if self._pace.steps == MEASURED_STEPS and steps_left * seconds > _LONG_RUN_S:
                self._log_duration(steps_left)

    def _log_duration(self, steps_left: int) -> None:
        """Log the measured step time and how long the `steps_left` remaining steps take."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # only once: until now the host may have been ahead
        seconds = self._pace.seconds_per_step or 0.0
        saves = self._plan.config.ckpt_freq * seconds
        log.info(
            f"measured over {MEASURED_STEPS - 1} steps: {seconds:.3g} s per step, "
            f"{self._plan.tokens_per_step / seconds:,.0f} tok/s; the remaining "
            f"{steps_left:,} steps take {units.duration(steps_left * seconds)}, with a checkpoint "
            f"every {units.duration(saves)}"
        )

    def _speeds(self) -> dict[str, float]:
        """Return the speed of the launch as figures of a row: tokens/s and the remaining seconds.

        The result is empty after the first step, which is not timed. The last row has no remaining
        seconds.
        """
        if (seconds := self._pace.seconds_per_step) is None:
            return {}
        speed = self._plan.tokens_per_step / seconds
        steps_left = self._plan.total_steps - self._state.step
        return {"perf/run_tokens_per_sec": speed} | (
            {"perf/eta_sec": steps_left * seconds} if steps_left else {}
        )

    def _describe_launch(self) -> str:
        """Return a text with the steps, the duration and the speed of this launch."""
        seconds = self._pace.seconds_per_step
        steps = self._pace.steps
        speed = (
            f", {self._plan.tokens_per_step / seconds:,.0f} tok/s after the first step"
            if seconds
            else ""
        )
        return (
            f"this launch: {units.counted(steps, 'step')} in "
            f"{units.duration(time.monotonic() - self._began)}{speed}"
        )

    def _write_row(self, row: dict[str, Any], ended: float) -> None:
        """Write a row: rank 0 to all outputs, another rank to its log."""
        self._metrics.write(row, ended)
        self.journal.prometheus.set_row(row, ended)
        record = console.format_record(row, self._layout.rank)
        log.to_file(record)
        in_dicts = self._plan.config.log_style == "dict"
        log.to_console(record if in_dicts else self._console_lines.format_row(row))
        self._show_on_bar(loss=f"{row['train/loss_mean']:.3f}")

    def rewind(self) -> None:
        """Drop the rows after the current step, because the following steps are repeated."""
        self._metrics.rewind(self._state.step)
        self._samples.rewind(self._state.step)
        self._bar.advance(self._state.step - self._bar.done)
        self.note_state(Status.RUNNING)

    def follow_save(self, save: Future[Any] | None) -> None:
        """Update state.json, the plot and the page once a save of this step has ended.

        save: as the checkpointer returns it. A save in a second tier changes only state.json.
        """
        facts = self._facts()

        def update_files(ended: Future[Any]) -> None:
            saved = None if ended.exception() else ended.result()
            if saved:
                self.journal.write_state(Status.RUNNING, **facts)
            if saved and saved.place.is_required:
                with self._plot_may_fail:
                    self._metrics.curve.draw(self._experiment.plot, self._caption)
                if facts["step"] != facts["total_steps"]:  # the page of a complete run follows
                    self._page.start()

        if save is not None and self._layout.rank == 0:
            save.add_done_callback(update_files)

    def note_stop(self, reason: str) -> None:
        """Record that the run stops after this step, whose checkpoint has been saved.

        reason: as StopRequest.agree_on_reason returns it. Raises Preempted if steps remain, or an
        evaluation.
        """
        self.write_held()
        step = self._state.step
        has_ended = step == self._plan.total_steps and not self._state.unevaluated
        self.note_state(Status.COMPLETE if has_ended else Status.PREEMPTED)
        self.journal.add_event(Event.SIGNAL, step, signal=reason)
        if not has_ended:
            change = " without --overwrite" if self._plan.config.overwrite else ""
            due = ", before its evaluation or samples ended" if self._state.unevaluated else ""
            raise Preempted(
                f"stopped by {reason} after step {step:,}, which is saved{due}; run the same "
                f"command again{change} to continue"
            )

    def note_state(self, status: str) -> None:
        """Write state.json with this status."""
        self._is_over |= status in (Status.COMPLETE, Status.PREEMPTED)
        self.journal.write_state(status, **self._facts())

    def _facts(self) -> dict[str, float | None]:
        """Return the fields of state.json about this step."""
        state = self._state
        return {
            "step": state.step,
            "global_step": state.step,  # the name that other trainers use
            "epoch": self._stream.epoch(state.position),
            "total_steps": self._plan.total_steps,
            "tokens": state.tokens,
            "sample_cursor": state.position.samples,
            "samples": self._plan.samples,
            "memory_estimate_gib": self._estimate.gib,
        }

    def finish(self) -> None:
        """Log the summary of a complete run; its last step has been saved."""
        self._bar.close()
        self.journal.add_event(Event.COMPLETE, self._state.step)
        self._page.finish()
        if self._layout.rank == 0 and (rows := self._training_rows()):
            log.info(
                f"done: {self._state.step:,} steps, {rows[-1]['train/tokens_seen']:,} tokens; "
                f"{self._describe_launch()}"
            )
            summary = {
                "training loss": metrics.describe_training_loss(rows),
                "validation loss": metrics.describe_validation_loss(rows),
            }
            if peak := self._meters.memory_peak:  # a launch without a step has measured none
                summary["memory"] = self._estimate.describe_peak(peak, self._meters.memory_before)
            log.table(summary | {"files": self._describe_files()})

    def _describe_files(self) -> str:
        """Return the paths of the report, the plot and the metrics that were written."""
        failed = {
            self._experiment.report: self._page.is_failing,
            self._experiment.plot: self._plot_may_fail.is_failing,
            self._experiment.metrics: False,
        }
        files = [path for path, is_failing in failed.items() if path.is_file() and not is_failing]
        missing = [path.name for path in failed if path not in files]
        reason = f" (not written: {', '.join(missing)}; see the warning above)" if missing else ""
        return ", ".join(map(str, files)) + reason

    def _training_rows(self) -> list[dict[str, Any]]:
        """Return the readable rows of the run that have a training loss."""
        return [row for row in row_files.read_rows(self._experiment.metrics) if "train/loss" in row]

    def _show_on_bar(self, **texts: str) -> None:
        """Show texts behind the progress bar; texts of other kinds stay."""
        self._bar_texts |= texts
        kinds = [kind for kind in _ON_BAR if kind in self._bar_texts]
        self._bar.show(", ".join(f"{kind} {self._bar_texts[kind]}" for kind in kinds))
