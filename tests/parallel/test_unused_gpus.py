# covers: lib/parallel/gpus.py
"""Unused GPUs are reported once, with the option that uses all of them."""

from __future__ import annotations

import pytest
import torch

from lib.core import log
from lib.parallel import gpus


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that returns the log line for a machine with eight GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def say(ranks: int, device: str = "auto") -> str:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        log.setup()
        gpus.report_unused(device)
        return capsys.readouterr().out

    return say


def test_the_option_that_uses_all_gpus_is_named(report) -> None:
    [line] = report(ranks=2).splitlines()
    assert "2 of the 8 GPUs" in line and "--nproc-per-node 8" in line


def test_nothing_is_logged_if_all_gpus_are_used_or_the_cpu_is_asked_for(report) -> None:
    assert not report(ranks=8)
    assert not report(ranks=1, device="cpu")


def test_offload_without_a_gpu_causes_a_warning(capsys: pytest.CaptureFixture) -> None:
    log.setup()
    for device in ("cpu", "auto") if not torch.cuda.is_available() else ("cpu",):
        gpus.warn_without_offload(device, "--cpu-offload")
        assert "--cpu-offload changes nothing here" in capsys.readouterr().out
    gpus.report_unused("cpu")
    assert not capsys.readouterr().out
