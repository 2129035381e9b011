# covers: lib/runs/run_files.py
"""The files of a run, as the monitor sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.core.paths import COMMIT
from lib.runs.run_files import RunFiles


def test_an_unreadable_checkpoint_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6, 8):
        directory = tmp_path / f"checkpoints/step_{step:08d}"
        directory.mkdir(parents=True)
        if step != 8:  # still being written
            (directory / COMMIT).touch()
    stat = Path.stat

    def fail(path: Path, **options: bool) -> object:
        if "step_00000004" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", fail)
    assert [step for step, _ in RunFiles(tmp_path).checkpoints()] == [2, 6]
