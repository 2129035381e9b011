"""Train a tiny model with gradients scaled in `clip` and in the optimizer; each rank runs this.

argv: a file for the results of rank 0, {"<optimizer> <precision> <ranks per replica> <offload>":
[scaled in clip, scaled in the optimizer]}, each as in summing.py.

"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.optim import guard
from lib.optim.guard import StepGuard
from lib.parallel.layout import ParallelLayout, make_mesh
from tests.parallel.summing import train_case

CASES = [
    ("adamw", "fp32", False),
    ("adamw8bit", "fp32", False),
    ("adamw", "fp16", False),
    ("adamw", "fp32", True),
]


def main() -> None:
    """Train every case both ways."""
    guard._ROW = 8  # so that shards have several rows
    layout = ParallelLayout.start()
    results = {}
    ranks = layout.ranks
    for shard in {ranks, 1}:
        mesh = make_mesh("cpu", ranks, ranks // shard)
        for optimizer, precision, offload in CASES:
            results[f"{optimizer} {precision} {shard} {offload}"] = [
                train_case(
                    layout,
                    mesh,
                    precision,
                    StepGuard(precision, 30.0, layout.device, ranks, fold),
                    optimizer,
                    offload,
                )
                for fold in (False, True)
            ]
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
