"""Run targets of the Makefile in a directory with the code and an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

LINKED = (
    "lib",
    "launch",
    "tests",
    "requirements.txt",
    "requirements-dev.txt",
    "pyproject.toml",
    *sorted(path.name for path in ROOT.glob("0[1-5]_*.py")),
)
# Variables that a surrounding `make test` passes on.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV", "PYTHON", "VIRTUAL_ENV")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with a space in its name, the code, and this Python as its .venv."""
    root = tmp_path / "a project"
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    for name in LINKED:
        (root / name).symlink_to(ROOT / name)
    python = root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for mark in ("installed", "installed-dev"):
        (root / ".venv" / mark).touch()
    return root


def person_environment() -> dict[str, str]:
    """Return the environment in which a person types `make`, outside of any `make test`."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    return {**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}


def make_target(place: Path, *arguments: str, expect: int = 0, **variables: str) -> str:
    """Run `make …` as a person types it, assert its exit code and return its output.

    variables: additions to the environment.
    """
    result = subprocess.run(
        ["make", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=580,
        env={**person_environment(), **variables},
    )
    assert result.returncode == expect, (
        f"{arguments}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    )
    return result.stdout + result.stderr
