"""The figures of a step: captured at its end, and read when the device has done the step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from lib.optim.guard import SkippedSteps
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import LossSum, eval_mode
from lib.parallel.routers import LoadFigures, RouterLoad
from lib.tokens.batches import DataStream, MicroBatch, Position, evaluation_batches
from lib.tokens.mixture import HeldOut
from lib.tokens.samples import IGNORED
from lib.train.meters import Meters, TimedSteps
from lib.train.plan import Plan
from lib.train.state import TrainState


def to_host(*scalars: torch.Tensor) -> torch.Tensor:
    """Return scalars of one device as float64 [n] in host memory, without waiting for the device.

    The numbers are there once the device has passed this point of its stream. They are copies:
    the scalars may be changed.
    """
    return torch.stack([scalar.double() for scalar in scalars]).to("cpu", non_blocking=True)


class LossSums(NamedTuple):
    """Holds the summed losses of a rank and the label tokens of all ranks.

    sums: of the last step and of the window, see `to_host`. steps: of the window.
    """

    sums: torch.Tensor
    last_tokens: int
    window_tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float:
        """Return the label tokens of the window's steps, on average."""
        return self.window_tokens / self.steps

    def means(self, step: float, window: float) -> tuple[float, float]:
        """Return the loss of the last step and of the window per label token; over none it is 0.

        step, window: the sums over all ranks.
        """
        return step / max(1, self.last_tokens), window / max(1, self.window_tokens)


class LossWindow:
    """The loss of a step, and of the steps since the last row, as means over label tokens."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        self._running, self._last, self._window = (self._zero() for _ in range(3))
        self._window_tokens = 0
        self._last_tokens = 0
        self._steps = 0

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._layout.device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the summed loss of a micro-batch of this rank."""
        self._running += loss.detach()

    def end_step(self, label_tokens: int) -> None:
        """End a step, of so many label tokens on all ranks."""
        self._last, self._running = self._running, self._zero()
        self._window = self._window + self._last
        self._last_tokens = label_tokens
        self._window_tokens += label_tokens
        self._steps += 1

    def capture(self) -> LossSums:
        """Return the sums of this rank, to be read later, and begin another window."""
        sums = to_host(self._last, self._window)
        captured = LossSums(sums, self._last_tokens, self._window_tokens, self._steps)
        self._window = self._zero()
        self._window_tokens = 0
        self._steps = 0
        return captured


class CapturedRow(NamedTuple):
    """Holds the row of a step until it is written, as it was when the host ended the step.

    position: of the data after the step. norm_and_skipped: the gradient norm and the numbers of a
    SkippedSteps, see `to_host`. load: of the experts. validation: figures that are added later.
    ended: seconds since the epoch. done: an event of the device behind the step, None on a CPU,
    which runs nothing ahead.
    """

    step: int
    epoch: float
    learning_rate: float
    tokens: int
    position: Position
    loss: LossSums
    norm_and_skipped: torch.Tensor
    load: LoadFigures
    speeds: dict[str, float]
    times: TimedSteps
    memory: dict[str, float]
    validation: dict[str, float]
    ended: float
    done: torch.cuda.Event | None


class Divergence(NamedTuple):
    """Says after which step too many steps in a row were bad, and where the data stood then.

    The run may have taken another step since, which a rollback undoes as well.
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
    """Return the row of the last step without waiting for the device, which may be behind.

    speeds: of the launch. All ranks must call this.
    """
    loss = window.capture()
    load = routers.capture()
    times = meters.timers.capture()
    norm_and_skipped = to_host(grad_norm, *state.guard.count_skipped())
    done = None
    if state.layout.device.type == "cuda":
        done = torch.cuda.Event()
        done.record()  # behind all that is read once it has come
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
        {},
        time.time(),
        done,
    )


def read_row(
    captured: CapturedRow, plan: Plan, layout: ParallelLayout, stream: DataStream, meters: Meters
) -> tuple[dict[str, Any], SkippedSteps]:
    """Return the figures of a row (keys: docs/reference/artifacts.md) and what was skipped.

    Waits until the device has done the step. The mean loss and all speeds are over the steps since
    the row before. All ranks must call this: they exchange their figures here, all at once.
    """
    if captured.done is not None:
        captured.done.synchronize()
    grad_norm, *counts = captured.norm_and_skipped.tolist()
    times = captured.times.read()
    alone = times["time/data"] + times["time/optimizer"]
    table = layout.table([*captured.loss.sums.tolist(), alone, captured.memory["memory/peak_gib"]])
    loss, mean_loss = captured.loss.means(*table[:, :2].sum(0).tolist())
    per_second = plan.tokens_per_step / (times["time/total"] / 1000)
    per_device = per_second / layout.ranks
    labels = captured.loss.tokens_per_step
    return {
        "step": captured.step,
        "epoch": captured.epoch,
        "train/loss": loss,
        "train/loss_mean": mean_loss,
        "train/grad_norm": grad_norm,
        "train/learning_rate": captured.learning_rate,
        "train/tokens_seen": captured.tokens,
        **captured.load.figures(),
        "perf/tokens_per_sec": per_second,
        "perf/tokens_per_sec_per_device": per_device,
        "perf/label_tokens_per_sec": labels / (times["time/total"] / 1000),
        "perf/tflops": per_device * meters.flops / 1e12,
        "perf/mfu": per_device * meters.flops / meters.peak,
        **captured.speeds,
        **times,
        **stream.costs(times),
        **captured.memory,
        **_compare_ranks(table[:, 2].tolist(), table[:, 3].tolist()),
        **captured.validation,
    }, SkippedSteps(*map(int, counts))


def _compare_ranks(alone: list[float], peaks: list[float]) -> dict[str, float]:
    """Return which rank is slowest in what no rank waits for others in, and which is fullest.

    In a step all ranks take as long as the slowest; only the optimizer and the data tell them
    apart. alone: milliseconds of these, by rank. peaks: GiB.
    """
    slowest = max(range(len(alone)), key=alone.__getitem__)
    usual = max(statistics.median(alone), 1e-9)
    return {
        "perf/slowest_rank": slowest,
        "perf/slowest_ratio": alone[slowest] / usual,
        "memory/max_peak_gib": max(peaks),
        "memory/max_peak_rank": peaks.index(max(peaks)),
    }


class Evaluation:
    """Measures the loss over the first --eval-batches global batches of each validation split."""

    def __init__(self, held_out: list[HeldOut], plan: Plan, layout: ParallelLayout) -> None:
        self._held_out = held_out
        self._plan = plan
        self._layout = layout

    def is_due(self, step: int) -> bool:
        """Tell whether the validation loss is measured after a step."""
        if not self._held_out:
            return False
        every = self._plan.config.eval_freq
        return step == self._plan.total_steps or bool(every and step % every == 0)

    def measure(
        self,
        model: nn.Module,
        loss_sum: LossSum,
        show: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]],
    ) -> dict[str, float]:
        """Return the validation loss as figures of a row; all ranks must call this.

        show: yields the batches and shows how many of them are done.
        """
        losses = {}
        for part in self._held_out:
            batches = evaluation_batches(
                part.samples, self._plan.config.eval_batches, self._plan.division
            )
            losses[part.name] = mean_loss(model, loss_sum, show(batches), self._layout)
        loss = sum(part.weight * losses[part.name] for part in self._held_out) / sum(
            part.weight for part in self._held_out
        )
        each = (
            {f"eval/loss/{name}": each for name, each in losses.items()} if len(losses) > 1 else {}
        )
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), **each}


@torch.no_grad()
def mean_loss(
    model: nn.Module, loss_sum: LossSum, batches: Iterable[MicroBatch], layout: ParallelLayout
) -> float:
    """Return the mean loss over all label tokens of all ranks; all ranks must call this."""
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    tokens = 0
    with eval_mode(model):
        for batch in batches:
            total += loss_sum(batch.to(layout.device), 1.0)
            tokens += int((batch.labels != IGNORED).sum())
    loss_total, token_total = layout.total([total.item(), tokens])
    return loss_total / max(token_total, 1)
