# covers: lib/core/launcher.py
"""The error file of a rank, read by torchrun's own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.core import launcher


def test_torchrun_reports_the_recorded_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    launcher.record_failure("ArtifactError", 3, "error: dataset x does not exist")
    message = json.loads(path.read_text())["message"]
    assert (message["errorCode"], message["kind"], message["rank"]) == (3, "ArtifactError", 3)
    report = str(ChildFailedError("stage", {3: ProcessFailure(1, 1234, 3, str(path))}))
    assert "dataset x" in report


def test_recording_a_failure_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    launcher.record_failure("UsageError", 2, "error: x")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    launcher.record_failure("UsageError", 2, "error: x")
    assert not list(tmp_path.iterdir())
