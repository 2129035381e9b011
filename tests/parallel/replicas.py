"""Train a tiny model with replicas of one rank that sum and that average; each rank runs this.

argv: a file for the results of rank 0, {"<precision>": [summed, averaged]}, each as in summing.py.

"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.optim.guard import StepGuard
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout, make_mesh
from tests.parallel.summing import train_case


def main() -> None:
    """Train every case both ways."""
    layout = ParallelLayout.start()
    results = {}
    ranks = layout.ranks
    mesh = make_mesh("cpu", ranks, ranks)
    for precision in ("fp32", "fp16"):
        results[precision] = []
        for averaged_on in ((), ("cpu",)):
            with (
                mock.patch.object(parallelize, "_AVERAGED_ON", averaged_on),
                mock.patch.object(
                    parallelize, "_sum_gradients", wraps=parallelize._sum_gradients
                ) as summing,
            ):
                guard = StepGuard(
                    precision,
                    30.0,
                    layout.device,
                    ranks,
                    divisor=parallelize.gradient_divisor(mesh),
                )
                results[precision].append(train_case(layout, mesh, precision, guard))
                results[precision][-1]["sum_calls"] = summing.call_count
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
