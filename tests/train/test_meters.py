# covers: lib/train/output/meters.py
"""The memory figures of a row: for the launch, and for the steps since the previous row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from lib.core.paths import Experiment
from lib.train.output.meters import Meters
from tests.train.test_plan import make_plan


def test_a_window_has_its_own_memory_peak(tmp_path: Path) -> None:
    """The peak of the launch alone would not show which steps need the most memory."""
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"))
    config = make_plan(samples=10, max_steps=1).config
    meters = Meters(config, Experiment(tmp_path, "exp"), layout, None, 1.0, 0.0, 0)
    meters.memory()
    torch.ones(1 << 27).sum()  # half a gigabyte, for a moment
    high, after = (meters.memory() for _ in range(2))
    assert high["memory/window_peak_gib"] - after["memory/window_peak_gib"] > 0.4
    assert after["memory/peak_gib"] == high["memory/peak_gib"] == high["memory/window_peak_gib"]
