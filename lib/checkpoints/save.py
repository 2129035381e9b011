"""Saving: all ranks capture their state and write their shards, rank 0 commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as safetensors_bytes
from torch import nn
from torch.distributed.tensor import DTensor

from lib.checkpoints import commit, state
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.staging import HostCopies
from lib.checkpoints.storage import HashingWriter, plain_errors
from lib.core import manifest, publish
from lib.optim import registry
from lib.parallel.layout import gather, on_rank_0

# What a COMMIT repeats of the train state, so that a table of checkpoints needs no other file.
_FACTS = ("tokens", "loss", "eval_loss", "bad_steps", "samples_per_epoch", "resumed_from",
          "resumed_path")


@dataclass(frozen=True)
class Snapshot:
    """What a rank contributes to a checkpoint.

    tensors: by name, sharded as they are. random_states: this rank's, by kind. train_state:
    JSON-like. identity: what a run that resumes from here must share. ready: returns when the
    tensors can be written.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    random_states: dict[str, torch.Tensor]
    train_state: dict[str, Any]
    identity: dict[str, Any]
    ready: Callable[[], None] = lambda: None


def capture(step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
            train_state: dict[str, Any], identity: dict[str, Any], device: torch.device,
            copies: HostCopies | None = None) -> Snapshot:
    """Return this rank's state after `step` steps.

    Without copies the tensors are those in use: write them before the next step. With copies, that
    step waits until they are made.
    """
    assert all(isinstance(p, DTensor) for p in model.parameters()), "gathered parameters"
    tensors = tensors_of(model, optimizer)
    train_state = train_state | {"optimizer_steps": registry.steps_taken(optimizer)}
    random_states = state.random_states(device)
    if copies is None:
        return Snapshot(step, tensors, random_states, train_state, identity)
    return Snapshot(step, copies.take(tensors, optimizer), random_states, train_state, identity,
                    copies.wait)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, sharded as they are."""
    return state.model_tensors(model) | state.optimizer_tensors(model, optimizer)


def write(checkpoints: Path, snapshot: Snapshot, group: dist.ProcessGroup) -> Checkpoint:
    """Commit what all ranks captured; all ranks must call this, one at a time on a group.

    Raises on every rank when any rank failed: DiskFullError, ArtifactError when ranks do not share
    the directory, or what DCP raised. Nothing of the attempt is left then.
    """
    snapshot.ready()
    attempt = on_rank_0(lambda: commit.attempt_directory(checkpoints, snapshot.step), group)
    try:
        writer = HashingWriter(attempt / commit.TENSORS)
        with plain_errors():
            dcp.save(snapshot.tensors, storage_writer=writer, process_group=group)
        entries = [entry for part in gather(writer.entries(commit.TENSORS), group)
                   for entry in part]
        random_states = state.gather_rng(snapshot.random_states, group)
        return on_rank_0(lambda: _commit(attempt, snapshot, entries, random_states,
                                         dist.get_world_size(group)), group)
    except BaseException:
        if dist.get_rank(group) == 0:
            commit.remove(attempt)
        raise


def _commit(attempt: Path, snapshot: Snapshot, entries: list[dict[str, Any]],
            random_states: dict[str, torch.Tensor], ranks: int) -> Checkpoint:
    """Write what is not sharded and commit (rank 0)."""
    manifest.write_json(attempt / commit.TRAIN_STATE, snapshot.train_state)
    # Not `save_file`: a full disk would raise its own kind of error there.
    (attempt / commit.RNG).write_bytes(safetensors_bytes(random_states))
    publish.fsync(attempt / commit.RNG)
    for name in (commit.TRAIN_STATE, commit.RNG):
        entries.append(manifest.file_entry(attempt, attempt / name, "sha256"))
    return commit.commit(attempt, snapshot.step, entries, snapshot.identity, ranks,
                         facts(snapshot))


def facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return what a COMMIT repeats of the train state."""
    return {key: snapshot.train_state[key] for key in _FACTS if key in snapshot.train_state}
