# covers: lib/checkpoints/__main__.py, lib/checkpoints/commit.py
"""`python -m lib.checkpoints`: the table of checkpoints and their problems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lib.checkpoints import commit
from tests.checkpoint_harness import commit_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def table(action: str, directory: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lib.checkpoints", action, directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_table_lists_checkpoints_and_their_problems(tmp_path: Path) -> None:
    checkpoints = tmp_path / "exp" / "checkpoints"
    paths = [
        commit_checkpoint(checkpoints, step, tokens=step * 1024, loss=2.5, eval_loss=None).path
        for step in (5, 10, 15)
    ]
    commit.quarantine(commit_checkpoint(checkpoints, 20), "for the test")
    listed = table("list", tmp_path / "exp")
    assert [line.split()[0] for line in listed.splitlines()[1:4]] == ["5", "10", "15"]
    assert "10,240" in listed and "2.5000" in listed and "in quarantine: " in listed
    assert table("verify", checkpoints).count("valid") == 4  # with the heading's `validation`
    (paths[1] / commit.TENSORS / "data").write_bytes(bytes(100))
    table("list", tmp_path / "exp")
    damaged = table("verify", tmp_path / "exp", code=3)
    assert "1 damaged checkpoint" in damaged and "other content" in damaged
    (paths[2] / commit.COMMIT).unlink()
    assert "COMMIT.json is missing" in table("list", tmp_path / "exp", code=3)
    assert all(path.exists() for path in paths)
    assert "no checkpoints" in table("list", tmp_path, code=2)
