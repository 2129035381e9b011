"""Write a rank's latest collectives, from torch's flight recorder, when the watchdog ends the rank.

lib/runs/collectives.py reads these files to name the ranks that others wait for.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lib.core import log, manifest

_ENTRIES = "2000"  # collectives to keep; torch has a default for NCCL, but not for gloo
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # for NCCL, if present, and for gloo
_SHOWN = (
    "profiling_name",
    "process_group",
    "collective_seq_id",
    "is_p2p",
    "input_sizes",
    "input_dtypes",
    "state",
    "time_created_ns",
)


def enable_recorder() -> None:
    """Let torch record every collective. Call this before creating a process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def dump_collectives(path: Path) -> None:
    """Write the process groups of this rank and their latest collectives as JSON.

    An entry is `pending` if its collective has not ended.
    """
    groups = {
        name: dist.get_process_group_ranks(group)
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    entries = [
        _make_row(entry)
        for name in _DUMPS
        if hasattr(c10d, name)
        for entry in json.loads(getattr(c10d, name)()).get("entries", [])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(
        path,
        json.dumps({"rank": log.rank(), "time": time.time(), "groups": groups, "entries": entries}),
    )


def _make_row(entry: dict[str, Any]) -> dict[str, Any]:
    is_done = entry.get("retired") or entry.get("state") == "completed"
    return {key: entry.get(key) for key in _SHOWN} | {"pending": not is_done}
