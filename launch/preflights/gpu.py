"""What a node's own tools say of its GPUs, NVLinks and EFA devices."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10
INFINIBAND = Path("/sys/class/infiniband")
_AMAZON = "0x1d0f"
_MIB = 1 << 20

# Asked for one group at a time: nvidia-smi refuses a whole query for one field that it lacks.
_QUERIES = {
    "identity": "index,name,driver_version,memory.total,memory.used,clocks.max.sm,temperature.gpu",
    "throttle": "index,clocks_throttle_reasons.active",
    "ecc": "index,ecc.errors.uncorrected.volatile.total",
}
_REMAP = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
# Bits of clocks_throttle_reasons.active (NVML, nvmlClocksEventReasons) that mean trouble.
_THROTTLES = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)",
              0x80: "power brake"}


class Missing(Exception):
    """A tool is absent, or does not say what was asked."""


def gpus() -> dict[str, Any]:
    """Return `{"gpus": [one dict each]}`, with why under `not_checked` for what was not told.

    A GPU has `index name driver memory_gib used_gib max_clock_mhz temperature_c`, and where told
    `throttled` (reasons), `ecc_errors`, `remap_pending`, `remap_failed`, `nvlinks`, `nvlinks_down`.
    """
    not_checked: dict[str, str] = {}
    try:
        found = [_identity(row) for row in _query(_QUERIES["identity"])]
    except Missing as missing:
        return {"gpus": [], "not_checked": {"GPUs": str(missing)}}
    for check, add in (("GPU clocks", _add_throttle), ("GPU ECC", _add_ecc),
                       ("GPU memory rows", _add_remap), ("NVLink", _add_nvlink)):
        try:
            add(found)
        except Missing as missing:
            not_checked[check] = str(missing)
    return {"gpus": found, "not_checked": not_checked}


def throttled() -> dict[str, str]:
    """Return why each GPU (by index) is slowed down right now; empty when none is, or unknown."""
    try:
        return {row[0]: reasons for row in _query(_QUERIES["throttle"])
                if (reasons := _reasons(row[1]))}
    except Missing:
        return {}


def efa(root: Path = INFINIBAND) -> dict[str, Any]:
    """Return `devices`: the RDMA devices with `name efa active`; `not_checked` when there is none.

    libfabric: whether `fi_info` sees the EFA provider, or why that is not known.
    """
    devices = []
    for path in sorted(root.glob("*")) if root.is_dir() else []:
        states = [_read(port) for port in path.glob("ports/*/state")]
        devices.append({"name": path.name, "efa": _read(path / "device/vendor") == _AMAZON,
                        "active": any("ACTIVE" in state for state in states)})
    if not devices:
        return {"devices": [], "not_checked": {"EFA": f"no RDMA device in {root}"}}
    told: dict[str, Any] = {"devices": devices, "not_checked": {}}
    if any(device["efa"] for device in devices):
        try:
            told["libfabric"] = "provider: efa" in _run("fi_info", "-p", "efa")
        except Missing as missing:
            told["not_checked"]["libfabric"] = str(missing)
    return told


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _run(*command: str) -> str:
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


def _query(fields: str, what: str = "gpu") -> list[list[str]]:
    told = _run("nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(told.splitlines()) if row]
    if not rows or any(len(row) != len(fields.split(",")) for row in rows):
        raise Missing("nvidia-smi says something else than was asked for")
    return rows


def _number(text: str) -> float | None:
    """Return a number; None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def _identity(row: list[str]) -> dict[str, Any]:
    index, name, driver, total, used, clock, temperature = row
    return {"index": index, "name": name, "driver": driver,
            "memory_gib": (_number(total) or 0) * _MIB / 2 ** 30,
            "used_gib": (_number(used) or 0) * _MIB / 2 ** 30,
            "max_clock_mhz": _number(clock), "temperature_c": _number(temperature)}


def _reasons(mask: str) -> str:
    try:
        bits = int(mask, 16)
    except ValueError:
        raise Missing(f"clocks_throttle_reasons is {mask!r}") from None
    return ", ".join(reason for bit, reason in _THROTTLES.items() if bits & bit)


def _add_throttle(found: list[dict[str, Any]]) -> None:
    for gpu, row in zip(found, _query(_QUERIES["throttle"]), strict=False):
        gpu["throttled"] = _reasons(row[1])


def _add_ecc(found: list[dict[str, Any]]) -> None:
    rows = _query(_QUERIES["ecc"])
    if all(_number(row[1]) is None for row in rows):
        raise Missing("these GPUs have no ECC, or it is off")
    for gpu, row in zip(found, rows, strict=False):
        gpu["ecc_errors"] = _number(row[1]) or 0


def _add_remap(found: list[dict[str, Any]]) -> None:
    for gpu, row in zip(found, _query(_REMAP, "remapped-rows"), strict=False):
        gpu["remap_pending"] = row[1].lower() in ("yes", "1")
        gpu["remap_failed"] = row[2].lower() in ("yes", "1")


def _add_nvlink(found: list[dict[str, Any]]) -> None:
    """Count links of each GPU in `nvidia-smi nvlink --status`, which has a block per GPU."""
    blocks = re.split(r"^GPU (\d+):", _run("nvidia-smi", "nvlink", "--status"), flags=re.MULTILINE)
    told = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    if not any("Link " in block for block in told.values()):
        raise Missing("these GPUs have no NVLink")
    for gpu in found:
        block = told.get(gpu["index"], "")
        gpu["nvlinks"] = len(re.findall(r"Link \d+: [\d.]+ GB/s", block))
        gpu["nvlinks_down"] = len(re.findall(r"Link \d+: <inactive>", block))
