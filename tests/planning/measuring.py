"""Measure a step of a tiny model on ranks that share rows; each rank runs this.

argv: a file for the bytes of rank 0 by kind, at the peak and in the update, and for each step its
settings, as JSON; `optimizer` is a key of OPTIMIZERS in test_update.py.
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
from lib.planning.trace import StepConfig
from lib.planning.tracker import Bytes, Tracker
from lib.planning.update import add_update, record_update
from tests.planning.test_memory import case, on_meta
from tests.planning.test_update import OPTIMIZERS


def measure_update(layout: ParallelLayout, step_config: StepConfig) -> Bytes:
    """Return the bytes by kind at the peak of an update of another model."""
    model = on_meta()
    parallelize.shard(model, layout.fsdp, step_config.precision)
    with Tracker() as tracker:
        parallelize.materialise_model(model, torch.device("cpu"), offload=False)
        for parameter in model.parameters():
            local_tensor(parameter).zero_()
        return record_update(model, step_config, tracker)


def main() -> None:
    """Run the steps one after the other, and write what they took."""
    layout = ParallelLayout.start()
    measured = []
    for settings in sys.argv[2:]:
        changes = json.loads(settings)
        if "optimizer" in changes:
            changes["optimizer"] = OPTIMIZERS[changes["optimizer"]]
        step_config = case(ranks=layout.ranks, **changes)
        model = on_meta()
        parallelize.parallelize(model, layout.fsdp, step_config.precision, step_config.recompute)
        with Tracker() as tracker:
            parallelize.materialise_model(model, torch.device("cpu"), offload=False)
            for parameter in model.parameters():
                local_tensor(parameter).zero_()
            head = model.get_output_embeddings()
            head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cuda"])
            step = trace.record_step(model, step_config, tracker)
        if step_config.optimizer.spec.is_joint:
            step = add_update(step, measure_update(layout, step_config))
        update = sum(step.moments[-1].values())
        measured.append({**step.largest, "total": step.total, "update": update})
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured))
    layout.stop()


if __name__ == "__main__":
    main()
