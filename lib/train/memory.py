"""Memory as the device reports it; on a CPU, as the kernel reports it for this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_GIB = 1 << 30
_RESET_PEAK = "5"  # proc(5), clear_refs


def total(device: torch.device) -> int:
    """Return the bytes of memory that this rank may count on."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here


def usage(device: torch.device) -> dict[str, float]:
    """Return `memory/{current,peak,reserved,total}_gib`; the peak is since the last call.

    On CUDA also `memory/alloc_retries`, how often the allocator had to give cached memory back.
    """
    if device.type == "cuda":
        figures = {"current": torch.cuda.memory_allocated(device),
                   "peak": torch.cuda.max_memory_allocated(device),
                   "reserved": torch.cuda.memory_reserved(device),
                   "total": total(device)}
        torch.cuda.reset_peak_memory_stats(device)
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text()
                      .splitlines() if ":" in line)
        resident, peak = (int(status[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
        figures = {"current": resident, "peak": peak, "reserved": resident,
                   "total": total(device)}
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    found = {f"memory/{name}_gib": value / _GIB for name, value in figures.items()}
    if device.type == "cuda":
        found["memory/alloc_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return found
