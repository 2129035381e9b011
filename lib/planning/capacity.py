"""Measure the memory of this rank: of its GPU, or its share of the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

_GIB = 1 << 30
_RESET_PEAK = "5"  # written to clear_refs, see proc(5)
_CGROUPS = Path("/sys/fs/cgroup")


def get_device() -> torch.device:
    """Return the device that this rank computes on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def count_total(device: torch.device) -> int:
    """Return the bytes of memory of this rank, free or not.

    On a CPU, control groups of this process may limit the memory.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min([physical, *(limit for limit, _ in _read_limits(_read_own_groups()))])
    return most // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def count_free(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate: all of a GPU, or its share of the host.

    On a CPU that is the free memory of the machine, within the limits of the control groups around
    this process (a container, a Slurm job), divided by the ranks on this machine. Swap counts,
    since the kernel would let such a run proceed.
    """
    if device.type == "cuda":
        return count_total(device)
    free = min(
        [_read_meminfo("MemAvailable"), *(free for _, free in _read_limits(_read_own_groups()))]
    )
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + count_free_swap(device)


def count_free_swap(device: torch.device) -> int:
    """Return the bytes of this rank's free memory that are swap, which is too slow for steps."""
    if device.type == "cuda":
        return 0
    return _read_meminfo("SwapFree") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _read_meminfo(name: str) -> int:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(row[1]) << 10 for row in rows if row[0] == f"{name}:")


def _read_own_groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _read_limits(groups: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group in bytes, and how many of them are free.

    Caches count as free, since the kernel gives them back. groups: lines as in cgroups(7), for
    version 1 `4:memory:/path` and for version 2 `0::/path`.
    """
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, limit, used, caches = (
            (_CGROUPS, "memory.max", "memory.current", ("inactive_file", "active_file"))
            if not controllers
            else (
                _CGROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
        )
        inner = root / path.strip("/")
        # A container sees its own group as the root, yet its path may be that of the host.
        for group in [inner, *inner.parents][: len(inner.parts) - len(root.parts) + 1]:
            with suppress(OSError, ValueError):  # unlimited: "max", or no such file at the root
                most = int((group / limit).read_text())
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                cached = sum(int(stat.get(name, 0)) for name in caches)
                yield most, most - int((group / used).read_text()) + cached


def memory_usage(device: torch.device) -> dict[str, float]:
    """Return `memory/{current,peak,reserved,total}_gib`.

    The peak covers the time since the last call. On CUDA the result includes
    `memory/alloc_retries`: how often the allocator had to return cached memory to the driver.
    """
    if device.type == "cuda":
        figures = {
            "current": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "total": count_total(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
    else:
        status = dict(
            line.split(":", 1)
            for line in Path("/proc/self/status").read_text().splitlines()
            if ":" in line
        )
        resident, peak = (int(status[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
        figures = {
            "current": resident,
            "peak": peak,
            "reserved": resident,
            "total": count_total(device),
        }
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    usage = {f"memory/{name}_gib": value / _GIB for name, value in figures.items()}
    if device.type == "cuda":
        usage["memory/alloc_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return usage
