"""Measure a step of a tiny model on ranks that share rows; each rank runs this.

argv: a file for the bytes of rank 0 by kind and at the peak, and for each step its settings, as
JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.models.sharded import local_tensor
from lib.parallel import loss, parallelize
from lib.parallel.layout import ParallelLayout
from lib.planning import trace
from lib.planning.tracker import Tracker
from tests.planning.test_memory import case, on_meta


def main() -> None:
    """Run the steps one after the other, and write what they took."""
    layout = ParallelLayout.start()
    measured = []
    for settings in sys.argv[2:]:
        step_config = case(ranks=layout.ranks, **json.loads(settings))
        model = on_meta()
        parallelize.parallelize(model, layout.fsdp, step_config.precision, step_config.recompute)
        with Tracker() as tracker:
            parallelize.materialise_model(model, torch.device("cpu"), offload=False)
            for parameter in model.parameters():
                local_tensor(parameter).zero_()
            head = model.get_output_embeddings()
            head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cuda"])
            step = trace.record_step(model, step_config, tracker)
        measured.append({**step.largest, "total": step.total})
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured))
    layout.stop()


if __name__ == "__main__":
    main()
