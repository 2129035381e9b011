"""Saving and loading alone, mostly of one small tensor, with all that is saved set by the step."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lib.checkpoints import commit, contents, search
from lib.checkpoints.snapshot import (
    Snapshot,
    capture_snapshot,
    get_random_states,
    load_snapshot,
    write_snapshot,
)
from lib.optim import registry

_CPU = torch.device("cpu")


def _group() -> dist.ProcessGroup:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _model(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, all of whose tensors hold a value."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = registry.build_optimizer(
        "adamw", model, 1e-3, registry.AdamWOptions(weight_decay=0.0)
    )
    with torch.no_grad():
        for tensor in _tensors(model, optimizer).values():
            tensor.fill_(value)
    return model, optimizer


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return contents.name_tensors(model, registry.named_states(model, optimizer))


def save(directory: str, first: str, last: str) -> None:
    """Save the steps from `first` to `last`, and keep two after each."""
    checkpoints = Path(directory)
    group = _group()
    for step in range(int(first), int(last) + 1):
        model, optimizer = _model(step)
        torch.manual_seed(step)
        write_snapshot(
            checkpoints,
            Snapshot(
                step,
                _tensors(model, optimizer),
                get_random_states(_CPU),
                {"step": step, "seed": 0},
                {"options": {}},
            ),
            group,
        )
        if dist.get_rank() == 0:
            commit.prune_checkpoints(checkpoints, keep=2)


def load_each(parent: str) -> None:
    """Print `<name> <step>` per directory in another; fail if a tensor is of a different step."""
    group = _group()
    for checkpoints in sorted(Path(parent).iterdir()):
        commit.delete_leftovers(checkpoints)
        checkpoint = search.find_newest_valid(checkpoints, group, lambda step, why: None)
        model, optimizer = _model(-1)
        torch.manual_seed(0)
        tensors = _tensors(model, optimizer)
        record = checkpoint.record()
        load_snapshot(checkpoint, tensors, record, _CPU, group)
        drawn = torch.rand(3)
        torch.manual_seed(checkpoint.step)
        values = torch.cat([tensor.flatten() for tensor in tensors.values()]).unique().tolist()
        assert values == [checkpoint.step] and record["step"] == checkpoint.step
        assert torch.equal(drawn, torch.rand(3))
        print(f"loaded {checkpoints.name} {checkpoint.step}")


def load_and_save(model_dir: str, source: str, target: str) -> None:
    """Load a checkpoint into a model sharded over these ranks, and save what is there."""
    from lib.core.paths import step_of
    from lib.models import architecture
    from lib.optim import registry
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    layout = ParallelLayout.start()
    model = architecture.build_on_meta(Path(model_dir))
    parallelize.shard(model, layout.fsdp, "fp32", False, False)
    parallelize.materialise(model, layout.device, False)
    adamw = registry.build_optimizer("adamw", model, 0.0)
    checkpoint = commit.Checkpoint(Path(source), step_of(Path(source).name))
    tensors = _tensors(model, adamw)
    record = checkpoint.record()
    load_snapshot(checkpoint, tensors, record, layout.device, layout.control)
    write_snapshot(
        Path(target), capture_snapshot(tensors, record, {}, layout.device), layout.saving
    )
    layout.stop()
