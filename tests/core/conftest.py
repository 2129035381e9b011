"""Run snippets of Python in child processes that can import lib/."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Python = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def environment() -> dict[str, str]:
    """Return an environment in which `import lib` works and the network guard is loaded."""
    return {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}"}


@pytest.fixture
def python(tmp_path: Path, environment: dict[str, str]) -> Python:
    """Return python(code, *argv, expect=0, env=None): runs code as a script would run."""

    def run(
        code: str, *argv: object, expect: int | None = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, argv)],
            cwd=tmp_path,
            env=environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if expect is not None:
            assert done.returncode == expect, (
                f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    return run
