# covers: lib/planning/capacity.py
"""The memory of this process is reported, and its peak since the last report."""

from __future__ import annotations

import torch

from lib.planning import capacity


def test_memory_usage_reports_this_process() -> None:
    figures = capacity.memory_usage(torch.device("cpu"))
    assert (
        0
        < figures["memory/current_gib"]
        <= figures["memory/peak_gib"]
        < figures["memory/total_gib"]
    )


def test_the_peak_covers_the_time_since_the_last_call() -> None:
    capacity.memory_usage(torch.device("cpu"))
    torch.ones(1 << 27).sum()  # half a gigabyte, for a moment
    high, after = (capacity.memory_usage(torch.device("cpu"))["memory/peak_gib"] for _ in range(2))
    assert high - after > 0.4
