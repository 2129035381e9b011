"""Download one wheel from the package index that pip is set up for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lib.core import log, units
from lib.core.errors import UsageError

_SHOWN = 5  # lines of pip's errors


def download_wheel(requirement: str, directory: Path, hint: str) -> Path:
    """Download the wheel of `NAME==VERSION`, without what it depends on, and return its path.

    hint: what to do without a network. Raises UsageError if pip cannot download it.
    """
    log.info(f"downloading {requirement} (pip download, from the index in its settings)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    process = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode or not wheels:
        lines = [line for line in process.stderr.splitlines() if not line.startswith("WARNING")]
        raise UsageError(
            f"pip cannot download {requirement}",
            found=units.join_lines(lines[-_SHOWN:], _SHOWN),
            hint=f"if the index can be reached, run the same command again; {hint}",
        )
    return wheels[0]
