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


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions; initialises CUDA if there is a GPU."""
    import torch

    facts: dict[str, Any] = {
        "gpus": 0,
        "cores": len(os.sched_getaffinity(0)),
        "host_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _find_version(name) for name in _PACKAGES},
    }
    if not torch.cuda.is_available():
        return facts
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(8, device="cuda").sum().item()  # raises an error if the GPU cannot compute
    return facts | {
        "gpus": torch.cuda.device_count(),
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver, power limit": query_driver(),
    }


def query_driver() -> str | None:
    """Return "driver version, power limit" of the first GPU; None if unknown."""
    lines = _query_nvidia_smi("--query-gpu=driver_version,power.limit", "-i", "0")
    return lines[0] if lines else None


def has_gpu() -> bool:
    """Return whether the driver lists a GPU; this does not initialise CUDA."""
    return bool(_query_nvidia_smi("--query-gpu=name"))


def describe_missing_compiler() -> str:
    """Return what this machine lacks to build Triton's launchers, "" if nothing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return "there is no C compiler (gcc, clang or $CC), without which Triton builds no kernel"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        ""
        if header.is_file()
        else f"there is no {header} (python3-dev), without which Triton builds no kernel"
    )


def list_gpu_processes() -> list[tuple[str, str]]:
    """Return (GPU UUID, process ID) for each process that uses memory of a GPU."""
    return [
        tuple(line.split(", ")) for line in _query_nvidia_smi("--query-compute-apps=gpu_uuid,pid")
    ]


def query_memory() -> list[tuple[float, float]]:
    """Return (used, total) in MiB for each GPU, as the driver sees them."""
    sizes = []
    for line in _query_nvidia_smi("--query-gpu=memory.used,memory.total"):
        with suppress(ValueError):  # a driver may report no number
            used, total = (float(part.split()[0]) for part in line.split(", "))
            sizes.append((used, total))
    return sizes


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _query_nvidia_smi(*arguments: str) -> list[str]:
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
