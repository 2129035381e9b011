"""Train a tiny model whose blocks keep their inputs on the host, and on the device.

argv: a file for the results of rank 0, {"<ranks per replica> <compiled>": [results on the host,
results on the device, bytes of each tensor on the host]}. The results are as in summing.py.

"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.optim.guard import StepGuard
from lib.parallel import parallelize
from lib.parallel.activation_offload import ActivationOffload
from lib.parallel.compiling import Compiler
from lib.parallel.layout import ParallelLayout, make_mesh
from tests.parallel.summing import train_case
from tests.parallel.test_activation_offload import LateCopies


def train_blocks(
    layout: ParallelLayout, mesh: DeviceMesh, compiled: bool, offload: ActivationOffload | None
) -> dict[str, Any]:
    """Return the results of a run whose blocks are recomputed. All ranks must call this."""
    compiler = Compiler(required=True) if compiled else None
    return train_case(
        layout,
        mesh,
        "bf16",
        StepGuard("bf16", 30.0, layout.device),
        wrap=lambda model: parallelize.wrap_blocks(model, "full", compiler, offload),
    )


def main() -> None:
    """Train every case both ways."""
    layout = ParallelLayout.start()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    results = {}
    ranks = layout.ranks
    for replicas in dict.fromkeys((1, 2, ranks)):
        mesh = make_mesh("cpu", ranks, replicas)
        for compiled in (False, True):
            late = LateCopies()
            results[f"{ranks // replicas} {compiled}"] = [
                *(train_blocks(layout, mesh, compiled, offload) for offload in (late, None)),
                late.sizes,
            ]
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
