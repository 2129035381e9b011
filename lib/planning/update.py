"""Trace the memory of an optimizer's update of all parameters.

An optimizer may work on several blocks at once. Then the update of a few blocks does not show how
much memory that of all blocks takes, as their forward and backward passes do.
"""

from __future__ import annotations

import copy

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lib.optim import registry
from lib.parallel import parallelize
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import SHARDED, Bytes, Tracker


def trace_update(model: PreTrainedModel, case: StepConfig, mesh: DeviceMesh) -> Bytes:
    """Return the bytes by kind at the peak of an update on rank 0.

    model: on the meta device; it is not changed.
    """
    model = copy.deepcopy(model)
    tracker = Tracker(SHARDED if case.offload else ())
    parallelize.shard(model, mesh, case.precision, case.offload)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        registry.as_on_gpu(case.optimizer.name),
        tracker,
    ):
        parallelize.materialise_model(model, torch.device("cpu"), offload=False)
        return record_update(model, case, tracker)


def record_update(model: PreTrainedModel, case: StepConfig, tracker: Tracker) -> Bytes:
    """Run an update of a sharded model, on fake or real tensors, and return its memory."""
    optimizer = registry.build_optimizer(case.optimizer.name, model, 1e-5, case.optimizer.options)
    tracker.new_kind = "gradients"
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    tracker.new_kind = "optimizer"
    registry.named_states(model, optimizer)
    tracker.restart("workspace")
    optimizer.step()
    return tracker.phases[-1]


def add_update(step: StepMemory, update: Bytes) -> StepMemory:
    """Return the memory of a step with that of its update.

    update: the result of `trace_update`. Its weights, gradients and states do not count, since the
    step has them too.
    """
    passing = {kind: size for kind, size in update.items() if kind not in SHARDED}
    return StepMemory(
        {kind: max(size, passing.get(kind, 0)) for kind, size in step.largest.items()},
        (*step.moments, step.moments[-1] | passing),
        step.offload,
    )
