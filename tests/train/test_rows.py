# covers: lib/train/output/rows.py, lib/train/output/meters.py
"""A row is captured without waiting for a GPU, and read after the GPU has reached its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lib.optim.guard import StepGuard
from lib.parallel.layout import ParallelLayout
from lib.parallel.routers import RouterLoad
from lib.tokens.batches import BEGINNING
from lib.train.output.meters import Timers
from lib.train.output.rows import LossWindow, capture_row, read_row

CPU = torch.device("cpu")
GPU = torch.device("cuda")
STEP_MS = 10.0


class Device:
    """Simulates a GPU that runs behind the host, with its events."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.is_timed = enable_timing

            def record(self) -> None:
                device.recorded += 1
                self.place = device.recorded

            def synchronize(self) -> None:
                device.reached = max(device.reached, self.place)

            def elapsed_time(self, ended: Any) -> float:
                assert self.is_timed and ended.is_timed
                assert max(self.place, ended.place) <= device.reached, (
                    "the device has not reached it"
                )
                return (ended.place - self.place) * STEP_MS

        self.Event = Event


def test_reading_a_row_waits_for_no_later_step(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    layout = ParallelLayout(0, 1, 0, 1, CPU, None, group, group)
    window = LossWindow(layout)
    timers = Timers(GPU)
    guard = StepGuard("bf16", 30.0, CPU)
    meters = SimpleNamespace(
        timers=timers,
        cost=SimpleNamespace(flops=10.0, attention=4.0),
        peak=1e3,
        memory=lambda: {"memory/peak_gib": 2.0},
    )
    stream = SimpleNamespace(epoch=lambda position: 0.5, costs=lambda times: {})
    state = SimpleNamespace(
        step=3, tokens=64, position=BEGINNING, guard=guard, layout=SimpleNamespace(device=GPU)
    )

    def step(loss: float) -> None:
        for phase in ("data", "forward", "backward", "update", "optimizer"):
            with timers(phase):
                pass
        window.add(torch.tensor(loss))
        window.end_step(4, 64)  # a quarter of 4 × 8²
        timers.count_step()

    for loss in (2.0, 6.0):
        step(loss)
    routers = RouterLoad([], CPU, "", 0.0)
    captured = capture_row(state, stream, meters, window, routers, torch.tensor(1.5), 1e-3, {})
    at = device.recorded
    step(100.0)  # the next step, which is not in the row
    guard.clip(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), 0.0, guard.scale_for(1))
    assert device.reached == 0, "capturing waited for the device"
    plan = SimpleNamespace(
        tokens_per_step=32,
        division=SimpleNamespace(global_batch=4),
        config=SimpleNamespace(seq_length=8),
    )
    row, skipped = read_row(captured, plan, layout, stream, meters)
    assert device.reached == at < device.recorded, "reading waited for the next step"
    assert (row["step"], row["train/loss"], row["train/loss_mean"]) == (3, 1.5, 1.0)
    assert row["train/grad_norm"] == 1.5 and row["memory/max_peak_gib"] == 2.0
    assert row["time/forward"] == STEP_MS and row["time/total"] == STEP_MS * 21 / 2
    assert row["perf/tokens_per_sec"] == pytest.approx(32 * 1000 / row["time/total"])
    assert row["perf/samples_per_sec"] == pytest.approx(4 * 1000 / row["time/total"])
    per_token = 10 - 4 * 3 / 4  # only the pairs of tokens that attend to each other
    assert row["perf/mfu"] == pytest.approx(row["perf/tokens_per_sec"] * per_token / 1e3)
    assert row["perf/tflops"] == pytest.approx(row["perf/mfu"] * 1e3 / 1e12)
    assert skipped == (0, 0, 0)


def test_captured_counts_are_copies() -> None:
    guard = StepGuard("bf16", 30.0, CPU)
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(2))])
    parameter.grad = torch.full((2,), float("nan"))
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    counts = guard.count_skipped()
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    assert counts.tolist() == [1, 0, 1] and guard.count_skipped().tolist() == [1, 0, 2]


def test_a_rollback_forgets_skipped_steps() -> None:
    guard = StepGuard("bf16", 30.0, CPU)
    saved = guard.state()
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(2))])
    parameter.grad = torch.full((2,), float("nan"))
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    guard.restore(saved)
    assert guard.count_skipped().tolist() == [0, 0, 0]
