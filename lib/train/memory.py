"""Memory as the device reports it; on a CPU, as the kernel reports it for this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lib.core.errors import UsageError

_GIB = 1 << 30


def explained(error: BaseException) -> UsageError | None:
    """Return what to do about an allocation that failed, None for any other error."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
        return None
    return UsageError("out of memory", found=text.splitlines()[0],
                      expected="a smaller --batch-size (with --grad-accum-steps to keep the global "
                               "batch), a smaller --seq-length, or more ranks to shard over")


def usage(device: torch.device) -> dict[str, float]:
    """Return `memory/{current,peak,reserved,total}_gib`; the peak is since the start."""
    if device.type == "cuda":
        figures = {"current": torch.cuda.memory_allocated(device),
                   "peak": torch.cuda.max_memory_allocated(device),
                   "reserved": torch.cuda.memory_reserved(device),
                   "total": torch.cuda.get_device_properties(device).total_memory}
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text()
                      .splitlines() if ":" in line)
        resident, peak = (int(status[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        figures = {"current": resident, "peak": peak, "reserved": resident, "total": total}
    return {f"memory/{name}_gib": value / _GIB for name, value in figures.items()}
