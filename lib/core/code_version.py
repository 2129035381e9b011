"""Find out from which commit this code comes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def find_git_commit() -> str:
    """Return the commit of the code, with `+` if files differ from it; empty if unknown."""

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return process.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return _find_bundle_commit()


def _find_bundle_commit() -> str:
    """Return the commit from which a bundle was packed, if the project was unpacked from one."""
    try:
        return json.loads((_ROOT / ".bundle.json").read_text())["summary"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
