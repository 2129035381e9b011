"""Describe a machine: GPUs, versions, and the processes that use memory of each GPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("transformers", "triton", "numpy", "xxhash", "orjson", "torchao", "datasets")


def describe() -> dict[str, Any]:
    """Return hardware and versions; initialises CUDA where there is a GPU."""
    import torch

    found: dict[str, Any] = {
        "gpus": 0,
        "cores": len(os.sched_getaffinity(0)),
        "host_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }
    if not torch.cuda.is_available():
        return found
    about = torch.cuda.get_device_properties(0)
    torch.zeros(8, device="cuda").sum().item()  # it also computes
    return found | {
        "gpus": torch.cuda.device_count(),
        "gpu": about.name,
        "gpu_gib": round(about.total_memory / 2**30, 1),
        "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver, power limit": driver(),
    }


def driver() -> str | None:
    """Return the version of the driver and the power limit of the first GPU; None if unknown."""
    lines = _smi("--query-gpu=driver_version,power.limit", "-i", "0")
    return lines[0] if lines else None


def has_gpu() -> bool:
    """Return whether the driver knows a GPU, without touching it."""
    return bool(_smi("--query-gpu=name"))


def lacks_compiler() -> str:
    """Return what is missing here to build Triton's launchers, empty if nothing is."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return "there is no C compiler (gcc, clang or $CC), without which Triton builds no kernel"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        ""
        if header.is_file()
        else f"there is no {header} (python3-dev), without which Triton builds no kernel"
    )


def contexts() -> list[tuple[str, str]]:
    """Return (GPU, process) for each process that holds memory of a GPU."""
    return [tuple(line.split(", ")) for line in _smi("--query-compute-apps=gpu_uuid,pid")]


def memory_mib() -> list[tuple[float, float]]:
    """Return (used, total) in MiB for each GPU, as the driver sees them."""
    found = []
    for line in _smi("--query-gpu=memory.used,memory.total"):
        with suppress(ValueError):  # a driver may not say
            used, total = (float(part.split()[0]) for part in line.split(", "))
            found.append((used, total))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _smi(*arguments: str) -> list[str]:
    try:
        return subprocess.run(
            ["nvidia-smi", "--format=csv,noheader", *arguments],
            timeout=30,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
