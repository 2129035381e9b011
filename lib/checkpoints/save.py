"""Saving: all ranks write their shards, rank 0 commits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as safetensors_bytes
from torch import nn
from torch.distributed.tensor import DTensor

from lib.checkpoints import commit, state
from lib.checkpoints.collective import gather, on_rank_0
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.storage import HashingWriter, plain_errors
from lib.core import manifest, publish

# What a COMMIT repeats of the train state, so that a table of checkpoints needs no other file.
_FACTS = ("tokens", "loss", "eval_loss", "samples_per_epoch", "resumed_from")


def save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
         train_state: dict[str, Any], identity: dict[str, Any], device: torch.device,
         group: dist.ProcessGroup) -> Checkpoint:
    """Commit the state after `step` steps; all ranks must call this.

    train_state: JSON-like. identity: what a run that resumes from here must share.
    Raises on every rank when any rank failed: DiskFullError, ArtifactError when ranks do not share
    the directory, or what DCP raised. Nothing of the attempt is left then.
    """
    assert all(isinstance(p, DTensor) for p in model.parameters()), "gathered parameters"
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    attempt = on_rank_0(lambda: commit.attempt_directory(checkpoints, step), group)
    try:
        tensors = state.model_tensors(model) | state.optimizer_tensors(model, optimizer)
        writer = HashingWriter(attempt / commit.TENSORS)
        with plain_errors():
            dcp.save(tensors, storage_writer=writer, process_group=group)
        entries = gather(writer.entries(commit.TENSORS), group)
        random_states = state.gather_rng(device, group)
        train_state = train_state | {"optimizer_steps": state.optimizer_steps(optimizer)}
        return on_rank_0(lambda: _commit(attempt, step, [e for part in entries for e in part],
                                          train_state, random_states, identity, world_size), group)
    except BaseException:
        if rank == 0:
            shutil.rmtree(attempt, ignore_errors=True)
        raise


def _commit(attempt: Path, step: int, entries: list[dict[str, Any]], train_state: dict[str, Any],
            random_states: dict[str, torch.Tensor], identity: dict[str, Any], world_size: int,
            ) -> Checkpoint:
    """Write what is not sharded and commit (rank 0)."""
    manifest.write_json(attempt / commit.TRAIN_STATE, train_state)
    # Not `save_file`: a full disk would raise its own kind of error there.
    (attempt / commit.RNG).write_bytes(safetensors_bytes(random_states))
    publish.fsync(attempt / commit.RNG)
    for name in (commit.TRAIN_STATE, commit.RNG):
        entries.append(manifest.file_entry(attempt, attempt / name, "sha256"))
    facts = {key: train_state[key] for key in _FACTS if key in train_state}
    return commit.commit(attempt, step, entries, identity, world_size, facts)
