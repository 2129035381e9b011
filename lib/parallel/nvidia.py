"""What NVIDIA's driver says of this machine, by nvidia-smi and the files of its kernel module."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TIMEOUT_S = 10
PROC = Path("/proc/driver/nvidia")
DEV = Path("/dev")
_NO_GPU = "No devices were found"
_LOAD = "index,utilization.gpu,memory.used,memory.total,power.draw,power.limit,temperature.gpu"


class Load(NamedTuple):
    """Says what a GPU does, None where it does not tell.

    gpu: its number. busy: per cent of the time in which a kernel ran. used, total: memory, MiB.
    watts, limit: power, W.
    """

    gpu: str
    busy: float | None
    used: float | None
    total: float | None
    watts: float | None
    limit: float | None
    celsius: float | None


class Missing(Exception):
    """Says that a tool is absent, or does not answer."""


def answer(*command: str) -> str:
    """Return what a tool of this machine prints; Missing where it is absent or fails."""
    if not shutil.which(command[0]):
        raise Missing(f"{command[0]} is not on this machine")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Missing(f"{command[0]} gave no answer ({type(error).__name__})") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise Missing(f"{command[0]} failed: {said}")
    return done.stdout


def query(fields: str, what: str = "gpu") -> list[list[str]]:
    """Return a row of cells for each GPU, as nvidia-smi prints fields; Missing as `answer`."""
    printed = answer("nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines()) if row]
    if printed.strip() == _NO_GPU:  # not every driver's fails then
        raise Missing("nvidia-smi finds no GPU")
    if not rows or any(len(row) != len(fields.split(",")) for row in rows):
        raise Missing("nvidia-smi says something else than was asked for")
    return rows


def number(text: str) -> float | None:
    """Return the number in a cell; None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def driver() -> str:
    """Return the version of the driver, "" where there is none."""
    for source in (
        lambda: query("driver_version")[0][0],  # which may be [N/A]
        lambda: (PROC / "version").read_text(encoding="ascii", errors="replace"),
    ):
        with suppress(Missing, OSError):
            if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", source()):
                return found[0]
    return ""


def names() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists, none where it is absent or fails."""
    try:
        return [name for (name,) in query("name")]
    except Missing:
        return []


def loads() -> list[Load]:
    """Return what each GPU that nvidia-smi lists is doing, none where it is absent or fails."""
    try:
        return [Load(gpu, *map(number, cells)) for gpu, *cells in query(_LOAD)]
    except Missing:
        return []


def device_files() -> list[Path]:
    """Return the device files of the GPUs that this container, or job, was given."""
    return sorted(DEV.glob("nvidia[0-9]*"))


def known_to_kernel() -> list[Path]:
    """Return an entry for each GPU of the machine, whoever may use it."""
    return sorted((PROC / "gpus").glob("*"))
