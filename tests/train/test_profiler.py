# covers: lib/train/output/meters.py
"""The profiler under Nsight Systems; tests/test_stage_04.py reads the files that a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.train.output import meters


def test_under_nsight_the_span_is_the_capture_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA allows only one profiler, so torch's stays off."""
    calls: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(meters, "profile", None)
    profiler = meters.Profiler((3, 4), tmp_path, 0, torch.device("cuda"))
    for step in range(1, 7):
        profiler.begin_step(step)
        calls.append(str(step))
        profiler.end_step(step)
    assert " ".join(calls) == "1 2 start 3 4 wait stop 5 6" and not list(tmp_path.iterdir())
