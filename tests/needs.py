"""What `make test-long` needs of a machine, and what of it is here: told at its start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

# What is needed: the commands that stand for it, and what brings them.
_TOOLS = {
    "Slurm and munge": (("slurmctld", "slurmd", "sbatch", "munged"), "Debian: slurm-wlm munge"),
    "network namespaces": (("ip", "unshare", "nsenter"), "Debian: iproute2 util-linux"),
    "memory file systems": (("mount", "umount"), "Debian: mount"),
    "kubectl 1.25 or newer": (("kubectl",), "Debian: kubernetes-client"),
    "a checkout": (("git",), "Debian: git"),
}


def _missing() -> dict[str, str]:
    """Return for each need what is absent; empty for one that is met."""
    found = {
        need: f"absent: {', '.join(absent)} ({package})" if absent else ""
        for need, (tools, package) in _TOOLS.items()
        for absent in [[tool for tool in tools if not shutil.which(tool)]]
    }
    if not found["kubectl 1.25 or newer"]:
        told = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True)
        version = re.search(r"v1\.(\d+)", told.stdout)
        found["kubectl 1.25 or newer"] = (
            ""
            if version and int(version[1]) >= 25
            else f"too old: {version[0] if version else 'unknown version'}"
        )
    ensurepip = find_spec("ensurepip")
    is_there = ensurepip and [*Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl")]
    return {
        "root": "absent: run it as root" if os.geteuid() else "",
        **found,
        "pip's wheel in Python": "" if is_there else "absent (Debian: python3-venv)",
        "pip's index": "asked for the wheels of requirements.txt that pip does not have",
    }


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say before the long tests what they need and what of it is here."""
    if config.getoption("markexpr") != "long":
        return []
    return [
        "the long tests need (what is skipped is listed with its reason at the end):",
        *(f"  {need + ':':<24} {state or 'here'}" for need, state in _missing().items()),
    ]
