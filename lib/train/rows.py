"""The figures of a step: captured at its end, and read when the device has done the step."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from lib.optim.guard import SkippedSteps
from lib.parallel.layout import ParallelLayout
from lib.parallel.routers import LoadFigures, RouterLoad
from lib.tokens.batches import DataStream, Position
from lib.train.meters import LossSums, LossWindow, Meters, TimedSteps, to_host
from lib.train.plan import Plan
from lib.train.state import TrainState


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
    """Return the figures of a row, as docs/artifacts.md defines its keys, and what was skipped.

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
