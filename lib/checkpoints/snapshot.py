"""Write one checkpoint from the state of all ranks, and load it again.

All ranks write their shards, and rank 0 commits. Verify a checkpoint before loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from lib.checkpoints import commit, contents
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.storage import HashingWriter, StrictReader, unwrap_dcp_errors
from lib.core import log, manifest, publish, units
from lib.core.errors import ArtifactError
from lib.models.tensor_file import encode_tensors
from lib.parallel.layout import gather, on_rank_0


@dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that one rank contributes.

    tensors: by name, sharded as in the model. random_states: this rank's random states by kind,
    uint8 [bytes]. identity: options and inputs that a resumed run must share with this run. ready:
    waits until the tensors can be written.
    """

    step: int
    tensors: dict[str, Tensor]
    random_states: dict[str, Tensor]
    record: TrainRecord
    identity: dict[str, Any]
    ready: Callable[[], None] = lambda: None


def capture_snapshot(
    tensors: dict[str, Tensor],
    record: TrainRecord,
    identity: dict[str, Any],
    device: torch.device,
    copies: HostCopies | None = None,
) -> Snapshot:
    """Return a snapshot of this rank's state after the step of the record.

    Without copies, the snapshot refers to the tensors in use; write it before the next step. With
    copies, the next optimizer step waits until they are complete.
    """
    states = get_random_states(device)
    if copies is None:
        return Snapshot(record["step"], tensors, states, record, identity)
    return Snapshot(
        record["step"], copies.copy_tensors(tensors), states, record, identity, copies.wait
    )


def write_snapshot(checkpoints: Path, snapshot: Snapshot, group: dist.ProcessGroup) -> Checkpoint:
    """Write and commit a checkpoint; all ranks must call this, one call at a time per group.

    If a rank fails, all ranks raise and the attempt is deleted. Raises DiskFullError, ArtifactError
    if the ranks do not share the directory, or the error of DCP.
    """
    snapshot.ready()
    attempt = on_rank_0(lambda: commit.create_attempt(checkpoints, snapshot.step), group)
    try:
        writer = HashingWriter(attempt / commit.TENSORS)
        with unwrap_dcp_errors():
            dcp.save(snapshot.tensors, storage_writer=writer, process_group=group)
        entries = [
            entry for part in gather(writer.entries(commit.TENSORS), group) for entry in part
        ]
        states = _gather_random_states(snapshot.random_states, group)
        return on_rank_0(
            lambda: _commit_attempt(attempt, snapshot, entries, states, dist.get_world_size(group)),
            group,
        )
    except BaseException:
        if dist.get_rank(group) == 0:
            commit.delete_attempt(attempt)
        raise


def _commit_attempt(
    attempt: Path,
    snapshot: Snapshot,
    entries: list[dict[str, Any]],
    states: dict[str, Tensor],
    ranks: int,
) -> Checkpoint:
    """Write the files that are not sharded, and commit, on rank 0."""
    manifest.write_json(attempt / commit.TRAIN_STATE, contents.select_saved(snapshot.record))
    (attempt / commit.RNG).write_bytes(encode_tensors(states, with_format=False))
    publish.fsync(attempt / commit.RNG)
    for name in (commit.TRAIN_STATE, commit.RNG):
        entries.append(manifest.file_entry(attempt, attempt / name, "sha256"))
    return commit.commit_attempt(
        attempt,
        snapshot.step,
        entries,
        snapshot.identity,
        ranks,
        contents.select_facts(snapshot.record),
    )


def load_snapshot(
    checkpoint: Checkpoint,
    tensors: dict[str, Tensor],
    record: TrainRecord,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Load tensors and random states from a verified checkpoint; all ranks must call this.

    Raises ArtifactError if names, shapes or dtypes differ.
    """
    reader = StrictReader(checkpoint.path / commit.TENSORS)
    require_same_tensors(tensors, reader, checkpoint.path)
    with torch.no_grad(), unwrap_dcp_errors():
        dcp.load(tensors, storage_reader=reader, process_group=group)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    if not _restore_random_states(checkpoint.path / commit.RNG, device, rank, ranks):
        torch.manual_seed(record["seed"] + 1_000_003 * checkpoint.step + rank)
        log.info("the number of ranks or the device type has changed: random states are reseeded")


def load_weights(
    checkpoint: Checkpoint, model: nn.Module, added: Set[str], group: dist.ProcessGroup
) -> None:
    """Load the weights of a verified checkpoint into a model; all ranks must call this.

    model: sharded or plain, allocated. Values are cast to the dtype of its parameters. added: names
    of the adapters' parameters, which are all that the checkpoint of a LoRA run contains; empty for
    other runs. Raises ArtifactError if names or shapes differ.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not added or name in added)
    tensors = contents.name_tensors(model, {})
    model.requires_grad_(False)
    reader = StrictReader(checkpoint.path / commit.TENSORS)
    saved = {
        name: (tuple(entry.size), tensors[name].dtype if name in tensors else torch.float32)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith(contents.OPTIMIZER)
    }
    require_same_specs(tensors, saved, checkpoint.path)
    with torch.no_grad(), unwrap_dcp_errors():
        dcp.load(tensors, storage_reader=reader, process_group=group)


def require_same_tensors(tensors: dict[str, Tensor], reader: StrictReader, path: Path) -> None:
    """Raise ArtifactError if names, shapes or dtypes differ from those in a checkpoint.

    DCP itself ignores extra keys and casts dtypes silently.
    """
    require_same_specs(
        tensors,
        {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        },
        path,
    )


def require_same_specs(
    tensors: dict[str, Tensor], saved: dict[str, tuple[tuple[int, ...], torch.dtype]], path: Path
) -> None:
    """Raise ArtifactError if names, shapes or dtypes differ from the saved ones."""
    problems = [f"{name} is missing" for name in tensors.keys() - saved.keys()]
    problems += [f"{name} is not in the model" for name in saved.keys() - tensors.keys()]
    for name in tensors.keys() & saved.keys():
        old = saved[name]
        new = (tuple(tensors[name].shape), tensors[name].dtype)
        if old != new:
            problems.append(
                f"{name} is {old[1]} {list(old[0])}, the model has {new[1]} {list(new[0])}"
            )
    if problems:
        listing = "\n".join(sorted(problems)[:8])
        raise ArtifactError(
            f"checkpoint {path} belongs to another model "
            f"({units.counted(len(problems), 'difference')})",
            found=listing,
            expected="the model that this experiment was started with",
        )


def get_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random states by kind, each uint8 [bytes]."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the random states that `get_random_states` returned."""
    # torch 2.13 crashes on a state that is a row of a mapped file, so copy it.
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _gather_random_states(states: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the random states of all ranks on rank 0, uint8 [ranks, bytes] per kind.

    Other ranks return an empty dictionary. All ranks must call this.
    """
    if dist.get_rank(group) != 0:
        dist.gather_object(states, None, group=group)
        return {}
    rows: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.gather_object(states, rows, group=group)
    return {kind: torch.stack([row[kind] for row in rows]) for kind in states}


def _restore_random_states(path: Path, device: torch.device, rank: int, ranks: int) -> bool:
    """Load this rank's random states; return False if the ranks or device types differ."""
    states = load_file(path)
    if len(states["cpu"]) != ranks or (device.type == "cuda") != ("cuda" in states):
        return False
    set_random_states({kind: rows[rank] for kind, rows in states.items()}, device)
    return True
