"""One checkpoint: what each rank contributes to it, written to its directory and filled in again.

All ranks write their shards, and rank 0 commits. What is loaded has been verified before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from lib.checkpoints import commit, contents
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.storage import HashingWriter, StrictReader, plain_errors
from lib.core import log, manifest, publish, units
from lib.core.errors import ArtifactError
from lib.parallel.layout import gather, on_rank_0


@dataclass(frozen=True)
class Snapshot:
    """What a rank contributes to a checkpoint.

    tensors: by name, sharded as they are. random_states: this rank's, by kind, uint8 [bytes].
    identity: what a run that resumes from here must share. ready: returns when the tensors can be
    written.
    """

    step: int
    tensors: dict[str, Tensor]
    random_states: dict[str, Tensor]
    record: TrainRecord
    identity: dict[str, Any]
    ready: Callable[[], None] = lambda: None


def capture(
    tensors: dict[str, Tensor],
    record: TrainRecord,
    identity: dict[str, Any],
    device: torch.device,
    copies: HostCopies | None = None,
) -> Snapshot:
    """Return this rank's state after the step of the record.

    Without copies the tensors are those in use: write them before the next step. With copies, that
    step waits until they are made.
    """
    states = random_states(device)
    if copies is None:
        return Snapshot(record["step"], tensors, states, record, identity)
    return Snapshot(record["step"], copies.take(tensors), states, record, identity, copies.wait)


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
        entries = [
            entry for part in gather(writer.entries(commit.TENSORS), group) for entry in part
        ]
        states = _gather_random_states(snapshot.random_states, group)
        return on_rank_0(
            lambda: _commit(attempt, snapshot, entries, states, dist.get_world_size(group)), group
        )
    except BaseException:
        if dist.get_rank(group) == 0:
            commit.remove(attempt)
        raise


def _commit(
    attempt: Path,
    snapshot: Snapshot,
    entries: list[dict[str, Any]],
    states: dict[str, Tensor],
    ranks: int,
) -> Checkpoint:
    """Write what is not sharded and commit (rank 0)."""
    manifest.write_json(attempt / commit.TRAIN_STATE, snapshot.record)
    # Not `save_file`: a full disk would raise its own kind of error there.
    (attempt / commit.RNG).write_bytes(safetensors_bytes(states))
    publish.fsync(attempt / commit.RNG)
    for name in (commit.TRAIN_STATE, commit.RNG):
        entries.append(manifest.file_entry(attempt, attempt / name, "sha256"))
    return commit.commit(
        attempt, snapshot.step, entries, snapshot.identity, ranks, contents.facts(snapshot.record)
    )


def fill(
    checkpoint: Checkpoint,
    tensors: dict[str, Tensor],
    record: TrainRecord,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Fill tensors and random states from a verified checkpoint; all ranks must call this.

    Raises ArtifactError when names, shapes or dtypes differ.
    """
    reader = StrictReader(checkpoint.path / commit.TENSORS)
    require_same(tensors, reader, checkpoint.path)
    with torch.no_grad(), plain_errors():
        dcp.load(tensors, storage_reader=reader, process_group=group)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    if not _restore_random_states(checkpoint.path / commit.RNG, device, rank, ranks):
        torch.manual_seed(record["seed"] + 1_000_003 * checkpoint.step + rank)
        log.info("other ranks or devices than at the save: random states are drawn anew")


def require_same(tensors: dict[str, Tensor], reader: StrictReader, path: Path) -> None:
    """Raise ArtifactError when names, shapes or dtypes differ from those in a checkpoint.

    DCP itself ignores extra keys and casts in silence.
    """
    require_described(
        tensors,
        {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        },
        path,
    )


def require_described(
    tensors: dict[str, Tensor], saved: dict[str, tuple[tuple[int, ...], torch.dtype]], path: Path
) -> None:
    """Raise ArtifactError when names, shapes or dtypes differ from those that were saved."""
    problems = [f"{name} is missing" for name in tensors.keys() - saved.keys()]
    problems += [f"{name} is not in the model" for name in saved.keys() - tensors.keys()]
    for name in tensors.keys() & saved.keys():
        there = saved[name]
        here = (tuple(tensors[name].shape), tensors[name].dtype)
        if there != here:
            problems.append(
                f"{name} is {there[1]} {list(there[0])}, the model has {here[1]} {list(here[0])}"
            )
    if problems:
        shown = "\n".join(sorted(problems)[:8])
        raise ArtifactError(
            f"checkpoint {path} is of another model ({units.counted(len(problems), 'difference')})",
            found=shown,
            expected="the model that this experiment was begun with",
        )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random states by kind, uint8 [bytes] each."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Take up random states, as random_states returned them."""
    # Copies: torch 2.13 crashes on a state that is a row of a mapped file.
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _gather_random_states(states: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the random states of all ranks, uint8 [ranks, bytes] per kind; empty but on rank 0.

    All ranks must call this.
    """
    if dist.get_rank(group) != 0:
        dist.gather_object(states, None, group=group)
        return {}
    rows: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.gather_object(states, rows, group=group)
    return {kind: torch.stack([row[kind] for row in rows]) for kind in states}


def _restore_random_states(path: Path, device: torch.device, rank: int, ranks: int) -> bool:
    """Take up this rank's random states; False when they are of other ranks or devices."""
    states = load_file(path)
    if len(states["cpu"]) != ranks or (device.type == "cuda") != ("cuda" in states):
        return False
    set_random_states({kind: rows[rank] for kind, rows in states.items()}, device)
    return True
