"""What every test may use: stages as subprocesses, and a guard against real network traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_GUARD = Path(__file__).parent / "network_guard"

StageRunner = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(autouse=True)
def no_foreign_sockets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Fail a test when one of its Python processes connects beyond this machine."""
    report = tmp_path_factory.mktemp("network") / "connections.txt"
    monkeypatch.setenv("NETWORK_GUARD_REPORT", str(report))
    monkeypatch.setenv("PYTHONPATH", str(_GUARD))
    yield
    if report.exists():
        pytest.fail(f"connected beyond this machine:\n{report.read_text()}")


@pytest.fixture
def stage(tmp_path: Path) -> StageRunner:
    """Return a function that runs a stage script in an empty directory.

    stage("01_organize_data.py", "--src-dir", "raw", expect=0, ranks=0, cwd=None, env=None,
    timeout=…): asserts the exit code (None: any) and returns the CompletedProcess with text
    `stdout` and `stderr`. ranks > 0 starts it through torchrun (which returns 1 for any failure).
    """
    def run(script: str, *arguments: object, expect: int | None = 0, ranks: int = 0,
            cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 300,
            ) -> subprocess.CompletedProcess:
        launcher = [sys.executable]
        if ranks:
            launcher += ["-m", "torch.distributed.run", "--standalone",
                         f"--nproc-per-node={ranks}"]
        command = [*launcher, str(ROOT / script), *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd or tmp_path, capture_output=True, text=True,
                              timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                    **(env or {})})
        if expect is not None:
            assert done.returncode == expect, \
                f"{command}\nexit {done.returncode}, expected {expect}\n{done.stdout}\n{done.stderr}"
        return done
    return run
