"""Save and load checkpoints without a trainer, mostly of one tensor whose values are the step."""

from __future__ import annotations

import json
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
from lib.core import manifest
from lib.optim import registry
from lib.optim.optimizers import MomentOptions

_CPU = torch.device("cpu")


def _start_group() -> dist.ProcessGroup:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _make_model(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer; all elements of their tensors have one value."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = registry.build_optimizer("adamw", model, 1e-3, MomentOptions(weight_decay=0.0))
    with torch.no_grad():
        for tensor in _name_tensors(model, optimizer).values():
            tensor.fill_(value)
    return model, optimizer


def _name_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return contents.name_tensors(model, registry.named_states(model, optimizer))


def commit_checkpoint(checkpoints: Path, step: int, **facts: object) -> commit.Checkpoint:
    """Commit a checkpoint whose only tensor file is some bytes."""
    attempt = commit.create_attempt(checkpoints, step)
    (attempt / commit.TENSORS).mkdir()
    (attempt / commit.TENSORS / "data").write_bytes(bytes(range(100)))
    (attempt / commit.TRAIN_STATE).write_text(json.dumps({"step": step}))
    files = [
        manifest.file_entry(attempt, attempt / name)
        for name in (f"{commit.TENSORS}/data", commit.TRAIN_STATE)
    ]
    return commit.commit_attempt(attempt, step, files, {"options": {}}, 2, {"tokens": 5} | facts)


def save_steps(directory: str, first: str, last: str) -> None:
    """Save the steps from `first` to `last`, keeping the two newest."""
    checkpoints = Path(directory)
    group = _start_group()
    for step in range(int(first), int(last) + 1):
        model, optimizer = _make_model(step)
        torch.manual_seed(step)
        write_snapshot(
            checkpoints,
            Snapshot(
                step,
                _name_tensors(model, optimizer),
                get_random_states(_CPU),
                {"step": step, "seed": 0},
                {"options": {}},
            ),
            group,
        )
        if dist.get_rank() == 0:
            commit.prune_checkpoints(checkpoints, keep=2)


def load_each(parent: str) -> None:
    """Load the newest checkpoint of each directory in `parent`; print `loaded <name> <step>`.

    Raises AssertionError if a tensor is from another step.
    """
    group = _start_group()
    for checkpoints in sorted(Path(parent).iterdir()):
        commit.delete_leftovers(checkpoints)
        checkpoint = search.find_newest_valid(checkpoints, group, lambda step, why: None)
        model, optimizer = _make_model(-1)
        torch.manual_seed(0)
        tensors = _name_tensors(model, optimizer)
        record = checkpoint.record()
        load_snapshot(checkpoint, tensors, record, _CPU, group)
        random_values = torch.rand(3)
        torch.manual_seed(checkpoint.step)
        values = torch.cat([tensor.flatten() for tensor in tensors.values()]).unique().tolist()
        assert values == [checkpoint.step] and record["step"] == checkpoint.step
        assert torch.equal(random_values, torch.rand(3))
        print(f"loaded {checkpoints.name} {checkpoint.step}")


def load_and_save(model_dir: str, source: str, target: str) -> None:
    """Load a checkpoint into a model sharded over these ranks, and save it again."""
    from lib.core.paths import step_of
    from lib.models import architecture
    from lib.optim import registry
    from lib.parallel import parallelize
    from lib.parallel.layout import ParallelLayout

    layout = ParallelLayout.start()
    model = architecture.build_on_meta(Path(model_dir))
    parallelize.shard(model, layout.fsdp, "fp32", False, False)
    parallelize.materialise_model(model, layout.device, False)
    adamw = registry.build_optimizer("adamw", model, 0.0)
    checkpoint = commit.Checkpoint(Path(source), step_of(Path(source).name))
    tensors = _name_tensors(model, adamw)
    record = checkpoint.record()
    load_snapshot(checkpoint, tensors, record, layout.device, layout.control)
    write_snapshot(
        Path(target), capture_snapshot(tensors, record, {}, layout.device), layout.saving
    )
    layout.stop()
