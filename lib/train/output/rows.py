"""Compute the figures of a row: capture them at the end of a step, and read them later.

They can be read without a wait once the device has completed the step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lib.optim.guard import SkippedSteps
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import LossFunction, ZLoss
from lib.parallel.routers import LoadFigures, RouterLoad
from lib.parallel.trial import eval_mode
from lib.tokens.batches import (
    DataStream,
    MicroBatch,
    Position,
    cut_array,
    read_evaluation_batches,
    read_evaluation_texts,
)
from lib.tokens.mixture import ValidationSplit
from lib.tokens.samples import IGNORED
from lib.train.data import Data
from lib.train.output import bits_per_byte
from lib.train.output.bits_per_byte import SourceLosses, TextLoss
from lib.train.output.meters import Meters, TimedSteps
from lib.train.plan import Plan
from lib.train.state import TrainState
from lib.train.suite import SuiteEvaluation


def copy_to_host(*scalars: torch.Tensor) -> torch.Tensor:
    """Copy scalars of one device to the host as float64 [n], without waiting for the device.

    The result is valid once the device has reached this point of its stream. The caller may
    change the scalars immediately.
    """
    return torch.stack([scalar.double() for scalar in scalars]).to("cpu", non_blocking=True)


class CapturedLoss(NamedTuple):
    """Contains summed losses of this rank, and numbers of label tokens of all ranks.

    sums: [2], the losses of the last step and of the window in nats, see `copy_to_host`; with
    --z-loss [3], the last one being the z-loss of the last step. steps: number of steps in the
    window. pairs: of tokens of one document in this rank's samples of the window, see
    `MicroBatch.count_pairs`.
    """

    sums: torch.Tensor
    last_tokens: int
    window_tokens: int
    steps: int
    pairs: float

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of label tokens in a step of the window."""
        return self.window_tokens / self.steps

    def means(self, step: float, window: float) -> tuple[float, float]:
        """Return the loss of the last step and of the window per label token, 0 without any.

        step, window: sums of the losses over all ranks.
        """
        return step / max(1, self.last_tokens), window / max(1, self.window_tokens)

    def mean_z_loss(self, step: float) -> float:
        """Return the z-loss of the last step per label token. step: its sum over all ranks."""
        return step / max(1, self.last_tokens)


class LossWindow:
    """Sums the training loss of a step, and of the steps since the last row, on the device."""

    def __init__(self, layout: ParallelLayout, z_loss: ZLoss | None = None) -> None:
        self._layout = layout
        self._sharing_ranks = layout.ranks // layout.dp_size
        self._z_loss = z_loss
        self._last_z_losses: list[torch.Tensor] = []
        self._running, self._last, self._window = (self._zero() for _ in range(3))
        self._window_tokens = 0
        self._last_tokens = 0
        self._steps = 0
        self._pairs = 0.0

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._layout.device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the summed loss of a micro-batch of this rank."""
        self._running += loss.detach()

    def end_step(self, label_tokens: int, pairs: int) -> None:
        """End a step. label_tokens: number on all ranks. pairs: in the rows of this rank.

        Ranks that share rows count an equal part of the pairs each.
        """
        self._last, self._running = self._running, self._zero()
        self._window = self._window + self._last
        self._last_z_losses = [self._z_loss.take_sum()] if self._z_loss else []
        self._last_tokens = label_tokens
        self._window_tokens += label_tokens
        self._steps += 1
        self._pairs += pairs / self._sharing_ranks

    def capture(self) -> CapturedLoss:
        """Return this rank's loss sums, to be read later, and start a new window."""
        sums = copy_to_host(self._last, self._window, *self._last_z_losses)
        captured = CapturedLoss(
            sums, self._last_tokens, self._window_tokens, self._steps, self._pairs
        )
        self._window = self._zero()
        self._window_tokens = 0
        self._steps = 0
        self._pairs = 0.0
        return captured


class CapturedRow(NamedTuple):
    """Contains the figures of a step, captured when the host ended the step, for a later row.

    position: position in the data after the step. norm_and_skipped: the gradient norm and the
    values of a SkippedSteps, see `copy_to_host`. load: load of the experts. ended: seconds since
    the epoch. done: an event of the device after the step, None on a CPU, where the host does all
    work itself.
    """

    step: int
    epoch: float
    learning_rate: float
    tokens: int
    position: Position
    loss: CapturedLoss
    norm_and_skipped: torch.Tensor
    load: LoadFigures
    speeds: dict[str, float]
    times: TimedSteps
    memory: dict[str, float]
    ended: float
    done: torch.cuda.Event | None


class Divergence(NamedTuple):
    """Describes the last of too many consecutive bad steps, and the position in the data after it.

    The run may have taken another step since. A rollback undoes that step as well.
    """

    step: int
    position: Position
    bad_steps: int


def capture_row(
    state: TrainState,
    stream: DataStream,
    meters: Meters,
    window: LossWindow,
    routers: RouterLoad,
    grad_norm: torch.Tensor,
    learning_rate: float,
    speeds: dict[str, float],
) -> CapturedRow:
    """Capture the row of the last step without waiting for the device, which may be behind.

    speeds: figures about the launch. All ranks must call this.
    """
    loss = window.capture()
    load = routers.capture()
    times = meters.timers.capture()
    norm_and_skipped = copy_to_host(grad_norm, *state.guard.count_skipped())
    done = None
    if state.layout.device.type == "cuda":
        done = torch.cuda.Event()
        done.record()  # after everything that read_row reads
    return CapturedRow(
        state.step,
        stream.epoch(state.position),
        learning_rate,
        state.tokens,
        state.position,
        loss,
        norm_and_skipped,
        load,
        speeds,
        times,
        meters.memory(),
        time.time(),
        done,
    )


def read_row(
    captured: CapturedRow, plan: Plan, layout: ParallelLayout, stream: DataStream, meters: Meters
) -> tuple[dict[str, Any], SkippedSteps]:
    """Return the figures of a row (keys: lib/runs/figures.py) and the skipped steps.

    Waits until the device has done the step. The mean loss and all speeds cover the steps since the
    previous row. All ranks must call this. They exchange all figures in one collective.
    """
    if captured.done is not None:
        captured.done.synchronize()
    grad_norm, *counts = captured.norm_and_skipped.tolist()
    times = captured.times.read()
    local_ms = times["time/data"] + times["time/optimizer"]
    peak = captured.memory["memory/peak_gib"]
    last, window, *z_losses = captured.loss.sums.tolist()
    table = layout.gather_table([last, window, local_ms, peak, captured.loss.pairs, *z_losses])
    loss, mean_loss = captured.loss.means(*table[:, :2].sum(0).tolist())
    seconds = times["time/total"] / 1000
    per_second = plan.tokens_per_step / seconds
    per_device = per_second / layout.ranks
    labels = captured.loss.tokens_per_step
    all_pairs = plan.tokens_per_step * plan.config.seq_length * captured.loss.steps
    skipped_share = 1 - table[:, 4].sum().item() / all_pairs  # of attention, 0 without packing
    per_token = meters.cost.flops - skipped_share * meters.cost.attention
    return {
        "step": captured.step,
        "epoch": captured.epoch,
        "train/loss": loss,
        "train/loss_mean": mean_loss,
        **(
            {"train/z_loss": captured.loss.mean_z_loss(table[:, 5].sum().item())}
            if z_losses
            else {}
        ),
        "train/grad_norm": grad_norm,
        "train/learning_rate": captured.learning_rate,
        "train/tokens_seen": captured.tokens,
        **captured.load.compute_figures(),
        "perf/tokens_per_sec": per_second,
        "perf/tokens_per_sec_per_device": per_device,
        "perf/label_tokens_per_sec": labels / seconds,
        "perf/samples_per_sec": plan.division.global_batch / seconds,
        "perf/tflops": per_device * per_token / 1e12,
        **({"perf/mfu": per_device * per_token / meters.peak} if meters.peak else {}),
        **captured.speeds,
        **times,
        **stream.costs(times),
        **captured.memory,
        **_compare_ranks(table[:, 2].tolist(), table[:, 3].tolist()),
    }, SkippedSteps(*map(int, counts))


def _compare_ranks(local_ms: list[float], peaks: list[float]) -> dict[str, float]:
    """Return figures about the slowest rank and the one with the largest memory peak.

    All ranks take as long for a step as the slowest one. Only the loading of data and the optimizer
    run without waiting for other ranks, so these phases show the slowest rank. local_ms: their
    milliseconds by rank. peaks: GiB by rank.
    """
    slowest = max(range(len(local_ms)), key=local_ms.__getitem__)
    usual = max(statistics.median(local_ms), 1e-9)
    return {
        "perf/slowest_rank": slowest,
        "perf/slowest_ratio": local_ms[slowest] / usual,
        "memory/max_peak_gib": max(peaks),
        "memory/max_peak_rank": peaks.index(max(peaks)),
    }


class Evaluation:
    """Measures the loss over the first --eval-batches global batches of each validation split.

    suite: evaluates the model on tasks as well, at the steps that it defines.
    """

    def __init__(
        self,
        held_out: list[ValidationSplit],
        plan: Plan,
        layout: ParallelLayout,
        suite: SuiteEvaluation,
    ) -> None:
        self._held_out = held_out
        self._plan = plan
        self._layout = layout
        self.suite = suite

    @classmethod
    def of_run(
        cls,
        data: Data,
        tokenizer_dir: Path,
        model: PreTrainedModel,
        plan: Plan,
        layout: ParallelLayout,
    ) -> Evaluation:
        """Return what evaluates the validation splits and tasks of the data."""
        suite = SuiteEvaluation(data.tasks, tokenizer_dir, model, plan, layout)
        return cls(data.held_out, plan, layout, suite)

    def is_due(self, step: int) -> bool:
        """Return whether the validation loss or the tasks are measured after a step."""
        return self.is_loss_due(step) or self.suite.is_due(step)

    def is_loss_due(self, step: int) -> bool:
        """Return whether the validation loss is measured after a step."""
        return bool(self._held_out) and self._plan.is_evaluated(step)

    def measure(
        self,
        model: nn.Module,
        compute_loss: LossFunction,
        show: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]],
    ) -> dict[str, float]:
        """Return the validation loss as figures of a row. All ranks must call this.

        show: a function that yields the batches and shows the progress.
        """
        losses: dict[str, float] = {}
        by_source: dict[str, dict[str, TextLoss]] = {}
        for part in self._held_out:
            losses[part.name], by_source[part.name] = self._measure_split(
                part, model, compute_loss, show
            )
        weights = sum(part.weight for part in self._held_out)
        loss = sum(part.weight * losses[part.name] for part in self._held_out) / weights
        figures = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
        if len(losses) > 1:
            figures |= {f"eval/loss/{name}": value for name, value in losses.items()}
        return figures | bits_per_byte.compute_figures(*_name_parts(by_source))

    def _measure_split(
        self,
        part: ValidationSplit,
        model: nn.Module,
        compute_loss: LossFunction,
        show: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]],
    ) -> tuple[float, dict[str, TextLoss]]:
        """Return the mean loss of a validation split, and its loss by source; {} without bytes."""
        chosen = (self._plan.config.eval_batches, self._plan.division)
        batches = show(read_evaluation_batches(part.samples, *chosen))
        if part.text is None:
            return measure_loss(model, compute_loss, batches, self._layout), {}
        names = part.text.names or [part.name]
        tally = SourceLosses(len(names), self._layout.device)
        texts = read_evaluation_texts(part.samples, part.text, *chosen)
        loss = measure_loss(model, compute_loss, batches, self._layout, tally, texts)
        sums = self._layout.sum_over_ranks(tally.sums())
        pairs = zip(sums[: len(names)], sums[len(names) :], strict=True)
        return loss, {name: TextLoss(*pair) for name, pair in zip(names, pairs, strict=True)}


def _name_parts(
    by_source: dict[str, dict[str, TextLoss]],
) -> tuple[dict[str, TextLoss], bool]:
    """Return the loss by source, or by dataset in a mixture, and whether no dataset lacks one."""
    if len(by_source) == 1:
        return next(iter(by_source.values())), True
    sums = {
        name: TextLoss(*map(sum, zip(*sources.values(), strict=True)))
        for name, sources in by_source.items()
        if sources
    }
    return sums, len(sums) == len(by_source)


@torch.no_grad()
def measure_loss(
    model: nn.Module,
    compute_loss: LossFunction,
    batches: Iterable[MicroBatch],
    layout: ParallelLayout,
    tally: SourceLosses | None = None,
    texts: Iterator[tuple[np.ndarray, np.ndarray]] | None = None,
) -> float:
    """Return the mean loss over the label tokens of all ranks. All ranks must call this.

    tally, texts: with both, the loss of each label is also added to its source; see
    `read_evaluation_texts`.
    """
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    tokens = 0
    with eval_mode(model):
        for batch in batches:
            mine = batch.divide(layout.context)
            token_losses: list[torch.Tensor] | None = None if tally is None else []
            total += compute_loss(mine.to(layout), 1.0, token_losses)
            tokens += int((mine.labels != IGNORED).sum())
            if tally and token_losses and texts:
                sources, sizes = next(texts)
                tally.add(
                    token_losses,
                    cut_array(sources, layout.context, -1),
                    cut_array(sizes, layout.context, 0),
                )
    loss_total, token_total = layout.sum_over_ranks([total.item(), tokens])
    return loss_total / max(token_total, 1)
