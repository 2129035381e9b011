#!/usr/bin/env python3
"""Create .venv from wheelhouse/ in this checkout, without a network and without a compiler.

  python3.11 launch/bundles/install_wheels.py

`airgap.py unpack --install` runs this script, which needs only Python. It does nothing if it has
finished before, and otherwise starts over. Exit codes: 0 done; 2 no wheelhouse, or pip failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lib.core import streams  # noqa: E402

# Each list of a wheelhouse, and the mark for it in .venv, as in the Makefile.
LISTS = {
    "requirements.txt": "installed",
    "requirements-dev.txt": "installed-dev",
    "requirements-optional.txt": "installed-optional",
}


def main() -> int:
    """Install all lists of the wheelhouse and return the exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    venv = ROOT / ".venv"
    wheels = ROOT / "wheelhouse"
    lists = [wheels / name for name in LISTS if (wheels / name).exists()]
    pip = next(wheels.glob("pip-*.whl"), None)
    if not lists or pip is None:
        print(
            f"error: {wheels} is not a wheelhouse\n  expected: one that `airgap.py pack` wrote",
            file=sys.stderr,
        )
        return 2
    if (venv / LISTS["requirements.txt"]).exists():
        print(f"{venv} is installed already")
        return 0
    # Neither ensurepip (which Debian lacks) nor this machine's configuration of pip is used.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run_pip = [str(venv / "bin" / "python"), str(pip / "pip")]
    requirement_words = [word for path in lists for word in ("-r", str(path))]
    for command in (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)],
        [
            *run_pip,
            "install",
            "--quiet",
            "--no-index",
            "--no-cache-dir",
            "--find-links",
            str(wheels),
            "pip",
            *requirement_words,
        ],
        [*run_pip, "check"],
    ):
        print("$ " + " ".join(command), flush=True)
        if subprocess.run(command, env=environment, check=False).returncode:
            return 2
    for path in lists:
        (venv / LISTS[path.name]).touch()
    return 0


if __name__ == "__main__":
    streams.outlive_readers()
    sys.exit(main())
