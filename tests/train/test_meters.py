"""The memory that the rows of a run report: of the launch, and of the steps since the last row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from lib.core.paths import Experiment
from lib.train.meters import Meters
from tests.train.test_plan import make


def test_a_window_has_a_peak_of_its_own(tmp_path: Path) -> None:
    """A figure of the launch alone would not show which steps need the most."""
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"))
    config = make(samples=10, max_steps=1).config
    meters = Meters(config, Experiment(tmp_path, "exp"), layout, 1.0, 1.0, 0.0, 0)
    meters.memory()
    torch.ones(1 << 27).sum()  # half a gigabyte, for a moment
    high, after = (meters.memory() for _ in range(2))
    assert high["memory/window_peak_gib"] - after["memory/window_peak_gib"] > 0.4
    assert after["memory/peak_gib"] == high["memory/peak_gib"] == high["memory/window_peak_gib"]
