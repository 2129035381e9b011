"""Which collectives a rank is in: torch's flight recorder, kept in logs/ when the watchdog ends it.

launch/runs/collectives.py reads from these files who waits for whom.
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

_ENTRIES = "2000"  # collectives that are kept, as torch does by itself for NCCL and not for gloo
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of GPUs (if torch has them), of hosts
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


def enable() -> None:
    """Have torch note every collective; must come before the first process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def dump(path: Path) -> None:
    """Write what this rank's groups are and what they did last; pending: what has not ended."""
    groups = {
        name: dist.get_process_group_ranks(group)
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
    entries = [
        _row(entry)
        for name in _DUMPS
        if hasattr(c10d, name)
        for entry in json.loads(getattr(c10d, name)()).get("entries", [])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(
        path,
        json.dumps({"rank": log.rank(), "time": time.time(), "groups": groups, "entries": entries}),
    )


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    is_done = entry.get("retired") or entry.get("state") == "completed"
    return {key: entry.get(key) for key in _SHOWN} | {"pending": not is_done}
