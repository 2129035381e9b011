"""Print at the start of `make test-long` what it needs, and what this machine lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

# Need → the commands that it consists of, and the packages that contain them.
_TOOLS = {
    "Slurm and munge": (("slurmctld", "slurmd", "sbatch", "munged"), "Debian: slurm-wlm munge"),
    "network namespaces": (("ip", "unshare", "nsenter"), "Debian: iproute2 util-linux"),
    "memory file systems": (("mount", "umount"), "Debian: mount"),
    "kubectl 1.25 or newer": (("kubectl",), "Debian: kubernetes-client"),
    "a checkout": (("git",), "Debian: git"),
}


def _find_missing() -> dict[str, str]:
    """Return what this machine lacks for each need, "" if nothing."""
    problems = {
        need: f"absent: {', '.join(absent)} ({package})" if absent else ""
        for need, (tools, package) in _TOOLS.items()
        for absent in [[tool for tool in tools if not shutil.which(tool)]]
    }
    if not problems["kubectl 1.25 or newer"]:
        result = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
        version = re.search(r"v1\.(\d+)", result.stdout)
        problems["kubectl 1.25 or newer"] = (
            ""
            if version and int(version[1]) >= 25
            else f"too old: {version[0] if version else 'unknown version'}"
        )
    ensurepip = find_spec("ensurepip")
    has_pip_wheel = ensurepip and [*Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl")]
    return {
        "root": "absent: run it as root" if os.geteuid() else "",
        **problems,
        "pip's wheel in Python": "" if has_pip_wheel else "absent (Debian: python3-venv)",
        "pip's index": "needed for the wheels of requirements.txt that pip has not cached",
    }


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return header lines for the long tests: each need, and whether this machine meets it."""
    if config.getoption("markexpr") != "long":
        return []
    return [
        "the long tests need (what is skipped is listed with its reason at the end):",
        *(f"  {need + ':':<24} {state or 'here'}" for need, state in _find_missing().items()),
    ]
