"""Saving: all ranks write their shards, rank 0 commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from lib.checkpoints import commit, state
from lib.checkpoints.storage import HashingWriter, plain_errors
from lib.core import manifest, paths, publish
from lib.core.errors import from_os_error


def save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
         train_state: dict[str, Any], identity: dict[str, Any], device: torch.device,
         group: dist.ProcessGroup) -> commit.Checkpoint:
    """Commit the state after `step` steps; all ranks must call this.

    train_state: JSON-like. identity: what a run that resumes from here must share.
    Raises on every rank when any rank failed: DiskFullError, or what DCP raised.
    """
    assert all(isinstance(p, DTensor) for p in model.parameters()), "gathered parameters"
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    told = [str(commit.attempt_directory(checkpoints, step)) if rank == 0 else ""]
    dist.broadcast_object_list(told, src=0, group=group)
    attempt = Path(told[0])
    tensors = state.model_tensors(model) | state.optimizer_tensors(model, optimizer)
    writer = HashingWriter(attempt / commit.TENSORS)
    try:
        with plain_errors():
            dcp.save(tensors, storage_writer=writer, process_group=group)
    except BaseException:
        if rank == 0:
            commit.clean(checkpoints)
        raise
    entries: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(entries, writer.entries(commit.TENSORS), group=group)
    random_states = state.gather_rng(device, group)
    error: list[Exception | None] = [None]
    if rank == 0:
        train_state = train_state | {"optimizer_steps": state.optimizer_steps(optimizer)}
        try:
            _commit(attempt, step, [e for part in entries for e in part], train_state,
                    random_states, identity, world_size)
        except OSError as failure:
            commit.clean(checkpoints)
            error = [from_os_error(failure) or failure]
    dist.broadcast_object_list(error, src=0, group=group)
    if error[0] is not None:
        raise error[0]
    return commit.Checkpoint(checkpoints / paths.step_name(step), step)


def _commit(attempt: Path, step: int, entries: list[dict[str, Any]], train_state: dict[str, Any],
            random_states: dict[str, torch.Tensor], identity: dict[str, Any], world_size: int,
            ) -> None:
    """Write what is not sharded and commit (rank 0)."""
    manifest.write_json(attempt / commit.TRAIN_STATE, train_state)
    save_file(random_states, attempt / commit.RNG)
    publish.fsync(attempt / commit.RNG)
    for name in (commit.TRAIN_STATE, commit.RNG):
        entries.append(manifest.file_entry(attempt, attempt / name, "sha256"))
    facts = {key: train_state[key] for key in ("tokens", "loss", "eval_loss") if key in train_state}
    commit.commit(attempt, step, entries, identity, world_size, facts)
