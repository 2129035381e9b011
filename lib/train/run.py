"""A run in progress: what the training loop holds, and what it does between steps."""

from __future__ import annotations

import gc
import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.checkpoints.save import capture, tensors_of
from lib.core import log, units
from lib.core.errors import DiskFullError, Preempted, from_os_error
from lib.core.lease import Lease
from lib.core.paths import Experiment
from lib.optim.guard import Skipped, StepGuard
from lib.parallel.layout import ParallelLayout, gather
from lib.parallel.loss import evaluate
from lib.planning import capacity
from lib.planning.estimate import MemoryEstimate
from lib.tokens.batches import BEGINNING, DataStream, Position, Step, evaluation_batches
from lib.train import metrics, symptoms
from lib.train.config import Config
from lib.train.journal import Journal
from lib.train.plan import Plan
from lib.train.profiling import Profiler
from lib.train.report import Report
from lib.train.saving import Saves
from lib.train.signals import StopRequest
from lib.train.startup import Data
from lib.train.timers import Timers
from lib.train.watchdog import Watchdog

_COLLECT_EVERY = 100  # steps
_LOCAL_PER_SHARED = 10  # checkpoints of the other tier for one that all share


@dataclass
class Run:
    """step: optimizer steps done. tokens: seen in them, without padding. rollbacks: see resume.py.

    flops: per token, forward and backward. peak: FLOP/s per rank. resumed_from, resumed_path:
    digest and place of the checkpoint that a person named with --resume, here or in an earlier
    launch. estimate, lease: on rank 0. memory_before: GiB in use before the model had memory.
    memory_peak: the most since then.
    """

    config: Config
    experiment: Experiment
    plan: Plan
    layout: ParallelLayout
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    step_guard: StepGuard
    data: Data
    stream: DataStream
    timers: Timers
    stop_request: StopRequest
    profiler: Profiler
    journal: Journal
    flops: float
    peak: float
    estimate: MemoryEstimate | None
    memory_before: float
    lease: Lease | None
    memory_peak: float = 0.0
    step: int = 0
    tokens: int = 0
    position: Position = BEGINNING
    rollbacks: int = 0
    resumed_from: str | None = None
    resumed_path: str | None = None
    model_files: dict[str, str] = field(default_factory=dict)
    report: Report = field(init=False)
    skipped: Skipped = field(default=Skipped(0, 0, 0))
    watchdog: Watchdog = field(init=False)
    saves: Saves = field(init=False)
    last: dict[str, Any] = field(default_factory=dict)

    def log_is_due(self) -> bool:
        """Tell whether this step's figures are logged: the first, each --log-freq-th, the last."""
        return self.step % self.config.log_freq == 0 or self.step in (1, self.plan.total_steps)

    def evaluation_is_due(self) -> bool:
        """Tell whether the validation loss is measured after this step."""
        if not self.data.held_out:
            return False
        every = self.config.eval_freq
        return self.step == self.plan.total_steps or bool(every and self.step % every == 0)

    def step_done(self, step: Step) -> None:
        """Count a step and its tokens, and do what comes after every one."""
        self.step, self.tokens = self.step + 1, self.tokens + step.tokens
        self.position = step.after
        self.timers.step_done()
        self.report.step_done(self.step)
        self.profiler.after(self.step)
        self.watchdog.enter("step")
        self.saves.finish(wait=False)
        if self._save_every() < self.plan.total_steps:
            self._prepare_copies()
        if self.step % _COLLECT_EVERY == 0:
            gc.collect()

    def figures(self, loss: float, mean_loss: float, grad_norm: torch.Tensor,
                learning_rate: float) -> dict[str, Any]:
        """Return the row of this step, as docs/artifacts.md defines its keys.

        loss: of the step. mean_loss, and all speeds: over the steps since the row before.
        """
        times = self.timers.read()
        per_second = self.plan.tokens_per_step / (times["time/total"] / 1000)
        per_device = per_second / self.layout.ranks
        in_use = capacity.usage(self.layout.device)
        self.memory_peak = max(self.memory_peak, in_use["memory/peak_gib"])
        in_use["memory/peak_gib"] = self.memory_peak
        return {"step": self.step, "epoch": self.stream.epoch(self.position),
                "train/loss": loss, "train/loss_mean": mean_loss,
                "train/grad_norm": grad_norm.item(),
                "train/learning_rate": learning_rate,
                "train/tokens_seen": self.tokens,
                "perf/tokens_per_sec": per_second, "perf/tokens_per_sec_per_device": per_device,
                "perf/tflops": per_device * self.flops / 1e12,
                "perf/mfu": per_device * self.flops / self.peak,
                **self.report.speeds(self.step), **times, **self._slowest(times),
                **self.stream.costs(times), **in_use}

    def _slowest(self, times: dict[str, float]) -> dict[str, float]:
        """Return which rank is slowest in what no rank waits for others in, and by how much.

        In a step all ranks take as long as the slowest; only the optimizer and the data tell them
        apart. All ranks must call this.
        """
        own = gather(times["time/data"] + times["time/optimizer"], self.layout.control)
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = max(statistics.median(own), 1e-9)
        return {"perf/slowest_rank": slowest, "perf/slowest_ratio": own[slowest] / usual}

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss; all ranks must call this."""
        self.watchdog.enter("evaluation")
        began = time.monotonic()
        held_out, losses = self.data.held_out, {}
        for part in held_out:
            batches = evaluation_batches(part.samples, self.config.eval_batches, self.plan.division)
            losses[part.name] = evaluate(self.model, self.report.validating(batches), self.layout)
        loss = sum(part.weight * losses[part.name] for part in held_out) \
            / sum(part.weight for part in held_out)
        each = {f"eval/loss/{name}": each for name, each in losses.items()} \
            if len(losses) > 1 else {}
        self.report.validated(self.step, loss, began)
        self.resume_timing()
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), **each}

    def tell(self, figures: dict[str, Any]) -> None:
        """Write this step's row everywhere, and say how many steps were skipped before it.

        Raises UsageError when the loss of the first step is NaN or infinite.
        """
        self.last = figures
        self.tell_estimate()
        self.report.row(figures)
        symptoms.require_finite(figures["train/loss"], self.step, self.config)
        self.skipped = self.step_guard.read()
        if self.skipped.steps:
            spikes = self.skipped.spikes
            why = f"the gradient norm was NaN or infinite in {self.skipped.steps - spikes}, and " \
                  f"over {self.config.spike_factor:g} times the usual in {spikes}"
            self.journal.event("skip_step", self.step, steps=self.skipped.steps, reason=why)
            log.warn(f"{self.skipped.steps} of the last steps left the weights as they were: {why}")

    def has_diverged(self) -> bool:
        """Tell whether so many of the last steps were skipped that an earlier state is better."""
        return self.skipped.in_a_row >= self.config.rollback_after

    def tell_estimate(self) -> None:
        """Say what memory the run will need at most, as soon as that is known."""
        if self.estimate is not None:
            self.estimate.tell()

    def save_if_due(self, stopping: str) -> None:
        """Save this step if it is one of --ckpt-freq, the last, or if the run is stopping.

        Between those, to the other tier. All ranks must call this.
        """
        is_last = self.step == self.plan.total_steps
        if stopping or self.step % self.config.ckpt_freq == 0 or is_last:
            self.save(stopping)
        elif self.step % self._save_every() == 0:
            self.save(local=True)

    def _save_every(self) -> int:
        """Return the steps between checkpoints of either tier."""
        config = self.config
        if self.saves.tier is None:
            return config.ckpt_freq
        return config.ckpt_local_freq or max(1, config.ckpt_freq // _LOCAL_PER_SHARED)

    def save(self, stopping: str = "", local: bool = False) -> None:
        """Begin to save this step, and wait for it if it is the last; all ranks must call this."""
        self.watchdog.enter("save")
        began, last = time.monotonic(), bool(stopping) or self.step == self.plan.total_steps
        self.saves.finish(wait=True)
        self._prepare_copies()
        self.saves.require_copies(self.layout.control)
        copies, facts = None if last else self.saves.copies, self._facts()

        def after() -> None:
            self.journal.state("running", **facts)
            if not local:
                self.report.draw()

        self.saves.begin(capture(self.step, self.model, self.optimizer, self._state(),
                                 self.plan.identity(), self.layout.device, copies), local, after)
        if copies is None:
            self.saves.finish(wait=True, last=last)
        else:
            self.saves.waited = time.monotonic() - began
            log.to_file(f"step {self.step:,}: saving in the background from a copy of "
                        f"{units.size(copies.bytes)} in host memory")
        if last:
            self.write_state("preempted" if self.step < self.plan.total_steps else "complete")
        if stopping:
            self.journal.event("signal", self.step, signal=stopping)
        self.resume_timing()

    def _prepare_copies(self) -> None:
        """Begin, once, to make room in host memory for what is saved in the background."""
        copies = self.saves.copies
        if copies is not None and not copies.are_prepared:
            copies.prepare(tensors_of(self.model, self.optimizer))

    def _state(self) -> dict[str, Any]:
        """Return all state that is not a tensor; all ranks must call this."""
        logged = self.last if self.last.get("step") == self.step else {}
        logged = {key: value for key, value in logged.items() if math.isfinite(value)}
        return {"step": self.step, "tokens": self.tokens,
                **self._position_record(),
                "seed": self.config.seed, "total_steps": self.plan.total_steps,
                "samples_per_epoch": self.plan.samples, "resumed_from": self.resumed_from,
                "resumed_path": self.resumed_path,
                "world_size": self.layout.ranks,
                "loss": logged.get("train/loss"), "eval_loss": logged.get("eval/loss"),
                "bad_steps": self.step_guard.in_a_row, "rollbacks": self.rollbacks,
                "loss_scale": self.step_guard.state(), "model_files": self.model_files}

    def _position_record(self) -> dict[str, Any]:
        """Return where the data stands, as train_state.json says it; all ranks must call this."""
        samples, cursor = self.position
        each = cursor and gather(cursor._asdict(), self.layout.control)  # one reader, one cursor
        return {"samples": samples} | (
            {"cursors": each[::len(each) // self.plan.division.dp_size]} if each else {})

    def note_quarantine(self, step: int, why: str) -> None:
        """Note in events.jsonl that a checkpoint was set aside."""
        self.journal.event("quarantine", step, reason=why)

    def resume_timing(self) -> None:
        """Go on with the steps after something else."""
        self.timers.restart()
        self.watchdog.enter("step")

    def write_state(self, status: str) -> None:
        """Write state.json."""
        self.journal.state(status, **self._facts())

    def _facts(self) -> dict[str, int]:
        """Return what state.json says of this step."""
        return {"step": self.step, "total_steps": self.plan.total_steps, "tokens": self.tokens,
                "sample_cursor": self.position.samples, "samples": self.plan.samples}

    def finish(self) -> None:
        """Tell how the run ended; the last step has been saved."""
        self.report.close_bar()
        if self.saves.tier is not None:
            self.saves.tier.remove(self.step)
        self.journal.event("complete", self.step)
        self.write_state("complete")
        if self.layout.rank != 0:
            return
        if rows := self.report.rows():
            log.info(f"done: {self.step:,} steps, {rows[-1]['train/tokens_seen']:,} tokens; "
                     f"{self.report.launch()}")
            log.table({"training loss": metrics.training(rows),
                       "validation loss": metrics.last_validation(rows),
                       "memory": self.estimate.compared(self.memory_peak, self.memory_before),
                       "plot": self.experiment.plot, "metrics": self.experiment.metrics})

    def preempted(self, stopping: str) -> Preempted:
        """Return what ends a run that was stopped after this step, which is saved."""
        again = " without --overwrite" if self.config.overwrite else ""
        return Preempted(f"stopped by {stopping} after step {self.step:,}, which is saved; run the "
                         f"same command again{again} to go on")

    def failed(self, error: BaseException) -> None:
        """Note in state.json how the run ended, unless it was stopped after saving."""
        if not isinstance(error, Preempted):
            known = from_os_error(error) if isinstance(error, OSError) else error
            self.write_state("disk_full" if isinstance(known, DiskFullError) else "failed")

    def close(self, in_order: bool) -> None:
        """Flush the logs and leave the process group; in_order: all ranks got here."""
        self.watchdog.enter("end")
        self.stream.close()
        if self.estimate is not None:
            self.estimate.close()
        self.report.close()
        if self.lease is not None:
            if in_order:  # asked to end while it was ending: not a word for the next launch
                with suppress(OSError):
                    self.experiment.stop_file.unlink(missing_ok=True)
            with suppress(OSError):  # a record that stays is known to be of a process that is gone
                self.lease.release()
        if in_order:
            self.layout.stop()
