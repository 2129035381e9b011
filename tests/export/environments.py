"""Make environments with packages of their own, which borrow all others from the tests' one."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


def make_environment(place: Path, *pins: str, with_dependencies: bool = False) -> Path:
    """Return the interpreter of a new environment with these packages.

    The packages of this environment are found after its own. with_dependencies: install what the
    packages need and this environment lacks.
    """
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    ours, theirs = (find_packages(which) for which in (sys.executable, python))
    (theirs / "ours.pth").write_text(f"{ours}\n")
    options = ["--quiet", "--disable-pip-version-check"]
    options += [] if with_dependencies else ["--no-deps", "--ignore-installed"]
    install = [python, "-m", "pip", "install", *options, *pins]
    subprocess.run(install, check=True, env=clean_environment())
    return python


def find_packages(python: str | Path) -> Path:
    """Return the directory of an interpreter's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    result = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(result.stdout.strip())


def clean_environment(**more: str) -> dict[str, str]:
    """Return the variables of this process without those of the tests' guard. more: further."""
    left_out = ("PYTHONPATH", "NETWORK_GUARD_REPORT")
    return {name: value for name, value in os.environ.items() if name not in left_out} | more
