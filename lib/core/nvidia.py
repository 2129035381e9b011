"""Query NVIDIA's driver through nvidia-smi and the files of its kernel module."""

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
    """The load of a GPU; None for values that it does not report.

    gpu: its index. busy: percentage of the time in which a kernel ran. used, total: memory in MiB.
    watts, limit: power in W.
    """

    gpu: str
    busy: float | None
    used: float | None
    total: float | None
    watts: float | None
    limit: float | None
    celsius: float | None


class ToolError(Exception):
    """A tool is absent, fails or does not answer."""


def run_tool(*command: str) -> str:
    """Return the output of a tool; raise ToolError if it is absent or fails."""
    if not shutil.which(command[0]):
        raise ToolError(f"{command[0]} is not on this machine")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise ToolError(f"{command[0]} gave no answer ({type(error).__name__})") from None
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise ToolError(f"{command[0]} failed: {message}")
    return done.stdout


def query_driver(fields: str, table: str = "gpu") -> list[list[str]]:
    """Return the fields of each row of a table of nvidia-smi; raise ToolError as `run_tool` does.

    fields: separated by commas. table: `gpu`, or another one that nvidia-smi can query.
    """
    printed = run_tool("nvidia-smi", f"--query-{table}={fields}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines()) if row]
    if printed.strip() == _NO_GPU:  # some drivers exit with 0 then
        raise ToolError("nvidia-smi finds no GPU")
    if not rows or any(len(row) != len(fields.split(",")) for row in rows):
        raise ToolError("nvidia-smi printed other fields than were asked for")
    return rows


def parse_number(text: str) -> float | None:
    """Return the number in a cell; None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def find_driver() -> str:
    """Return the version of the driver, or "" without one."""
    for source in (
        lambda: query_driver("driver_version")[0][0],  # may be [N/A]
        lambda: (PROC / "version").read_text(encoding="ascii", errors="replace"),
    ):
        with suppress(ToolError, OSError):
            if version := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", source()):
                return version[0]
    return ""


def list_names() -> list[str]:
    """Return the names of the GPUs from nvidia-smi; none if it is absent or fails."""
    try:
        return [name for (name,) in query_driver("name")]
    except ToolError:
        return []


def list_loads() -> list[Load]:
    """Return the load of each GPU from nvidia-smi; none if it is absent or fails."""
    try:
        return [Load(gpu, *map(parse_number, cells)) for gpu, *cells in query_driver(_LOAD)]
    except ToolError:
        return []


def list_device_files() -> list[Path]:
    """Return the device files of the GPUs that this container or job was given."""
    return sorted(DEV.glob("nvidia[0-9]*"))


def list_kernel_gpus() -> list[Path]:
    """Return the driver's /proc entry of each GPU, even if this process may not use it."""
    return sorted((PROC / "gpus").glob("*"))
