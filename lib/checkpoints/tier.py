"""Keep frequent checkpoints in a second tier, in addition to those in the run's directory.

Tier contains what all tiers share, and LocalTier stores the checkpoints on local disks. There, the
protocol and the files are the same as in commit.py, except that each node commits the files of its
own ranks, and each rank writes its own shards:

    step_00001050/dcp/rank_00003/*.distcp, .metadata       shards and random states of a rank
    step_00001050/train_state.json, manifest.json, COMMIT.json

A local checkpoint exists if every node has committed its part of the same save. Only the same ranks
on the same nodes can load it; otherwise a run uses the newest shared checkpoint. The other tiers
are those that vendor_tiers.py lists.
"""

from __future__ import annotations

import pkgutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lib.checkpoints import commit, vendor_tiers
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord, select_facts, select_saved
from lib.checkpoints.place import CheckpointPlace, SavedRun
from lib.checkpoints.snapshot import (
    Snapshot,
    get_random_states,
    require_same_tensors,
    set_random_states,
)
from lib.checkpoints.storage import HashingWriter, StrictReader, unwrap_dcp_errors
from lib.core import log, manifest, partial_dirs, paths, publish
from lib.core.errors import StageError, UsageError
from lib.core.identity import find_differences
from lib.models.sharded import local_tensor
from lib.parallel.layout import gather, on_all_ranks, on_rank_0
from lib.runs.events import Event

_KEEP = 2  # local checkpoints
_TIER_PER_SHARED = 10  # checkpoints of the tier for each one in the run's directory
_RANDOM = "random."  # prefix of random states among the tensors


class Tier(CheckpointPlace):
    """Frequent checkpoints of one run, which only the same number of ranks can load.

    Each rank writes its own shards. The run does not rely on this tier: it can always fall back to
    the shared checkpoints. Checkpoints of runs with another identity are ignored.
    """

    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        """Load tensors from this rank's part; raise ArtifactError if names or shapes differ."""
        raise NotImplementedError

    def load(self, checkpoint: Checkpoint, tensors: dict[str, Tensor], record: TrainRecord) -> None:
        """Load the tensors and random states of this rank."""
        device = self.run.layout.device
        states = get_random_states(device)
        self._fill(checkpoint, _merge_local(tensors, states))
        set_random_states(states, device)


def get_local_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return this rank's tensors of a snapshot, including its random states."""
    return _merge_local(snapshot.tensors, snapshot.random_states)


def _merge_local(tensors: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_tensor(tensor) for name, tensor in tensors.items()} | {
        _RANDOM + kind: state for kind, state in states.items()
    }


class LocalTier(Tier):
    """Checkpoints of one run in a local directory of each node.

    Each run has its own directory there, because the tier prunes and deletes all checkpoints in it.
    Raises UsageError if the directory cannot be used.
    """

    where = "the nodes' own disks"

    def __init__(self, run: SavedRun, root: str, every: int) -> None:
        """root: the directory for the checkpoints of all runs."""
        super().__init__(run, every)
        directory = Path(root) / f"{run.name}-{run.id}"
        self._directory = directory
        self._control = run.layout.control
        self._saving = run.layout.saving
        self._rank = run.layout.rank
        self._ranks = run.layout.ranks
        self._node = self._find_node_ranks()
        self._is_node_leader = self._rank == self._node[0]
        self._prune_may_fail = log.WarnOnce(
            f"old checkpoints in {directory}", OSError, StageError, done="deleted"
        )
        cleaned = gather(
            commit.delete_leftovers(directory) if self._is_node_leader else [], self._control
        )
        if leftovers := [name for names in cleaned for name in names]:
            run.note(Event.CLEAN, 0, paths=leftovers, where=self.where)

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit a checkpoint on all nodes or on none; if a rank fails, all ranks raise."""
        snapshot.ready()
        save = on_rank_0(lambda: f"{time.time_ns():x}", self._saving)
        attempt = self._directory / f"{paths.step_name(snapshot.step)}.tmp-{save}"
        try:
            written = on_all_ranks(lambda: self._write_shards(attempt, snapshot), self._saving)
            files = [entry for rank in self._node for entry in written[rank]]
            on_all_ranks(lambda: self._seal(attempt, snapshot, files, save), self._saving)
        except BaseException:
            commit.delete_attempt(attempt)
            raise
        deleted = on_all_ranks(lambda: self._publish(attempt, snapshot.step), self._saving)
        self.note_deleted(snapshot.step, deleted[0])
        return Checkpoint(self._directory / paths.step_name(snapshot.step), snapshot.step)

    def _publish(self, attempt: Path, step: int) -> list[int]:
        """Rename this node's sealed attempt, prune checkpoints, and return the deleted steps."""
        if not self._is_node_leader:
            return []
        final = attempt.with_name(paths.step_name(step))
        deleted = []
        if final.exists():  # from an earlier launch; another node has lost its part
            commit.delete_checkpoints([final])
            deleted.append(step)
        commit.publish_attempt(attempt, step)
        with self._prune_may_fail:
            deleted += commit.prune_checkpoints(self._directory, _KEEP)
        return deleted

    def find_newest(self, before: int | None = None, after: int = 0) -> Checkpoint | None:
        """Return the newest checkpoint that is intact on all nodes.

        A damaged part is moved to quarantine; a part that a disk fails to read stays where it is.
        """
        usable = {
            (step, facts["save"])
            for step, facts in self._read_commits().items()
            if facts["world_size"] == self._ranks
            and facts["ranks"] == self._node
            and not find_differences(facts["identity"], self.run.identity)
        }
        on_all_nodes = set.intersection(*gather(usable, self._control))
        for step, _ in sorted(on_all_nodes, reverse=True):
            if step <= after or (before is not None and step > before):
                continue
            checkpoint = Checkpoint(self._directory / paths.step_name(step), step)
            parts = gather(self._content_problems(checkpoint), self._control)
            problems = [text for part, _ in parts for text in part]
            if not problems:
                return checkpoint
            if self._is_node_leader and all(is_readable for _, is_readable in parts):
                commit.quarantine(checkpoint, problems[0])
            if self._rank == 0:
                self.note_damaged(step, f"on a node's own disk: {problems[0]}")
        return None

    def _read_commits(self) -> dict[int, dict[str, Any]]:
        """Return the content of COMMIT by step, for checkpoints of this node with correct sizes.

        Checkpoints that a disk fails to read are left out with a warning.
        """
        commits = {}
        with log.WarnOnce(str(self._directory), StageError, done="read"):
            for checkpoint in commit.list_checkpoints(self._directory):
                try:
                    if not checkpoint.problems():
                        commits[checkpoint.step] = checkpoint.commit()
                except (OSError, StageError) as error:
                    log.warn(f"{checkpoint.path} is not used, and stays where it is: {error}")
        return commits

    def _content_problems(self, checkpoint: Checkpoint) -> tuple[list[str], bool]:
        """Return the problems that this rank finds, and whether it could read its share."""
        try:
            return checkpoint.content_problems(self._node.index(self._rank), len(self._node)), True
        except (OSError, StageError) as error:
            return [str(error)], False

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to this tier."""
        return checkpoint.path.parent == self._directory

    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        reader = StrictReader(checkpoint.path / _shard_directory(self._rank))
        require_same_tensors(tensors, reader, checkpoint.path)
        with torch.no_grad(), unwrap_dcp_errors():
            dcp.load(tensors, storage_reader=reader, no_dist=True)

    def clear(self, step: int) -> None:
        """Delete all checkpoints of the tier, because the run is complete at this step."""
        if not self._is_node_leader:
            return
        with self._prune_may_fail:
            commit.delete_leftovers(self._directory)
            checkpoints = commit.list_checkpoints(self._directory)
            commit.delete_checkpoints(c.path for c in checkpoints)
            self.note_deleted(step, [c.step for c in checkpoints], "the run is complete")
            with suppress(OSError):  # fails if something is in quarantine, which stays
                self._directory.rmdir()

    def drop_newer(self, step: int, why: str) -> None:
        """Quarantine the checkpoints after a step, because the run continues from that step."""
        if self._is_node_leader:
            commit.quarantine_newer(self._directory, step, why)

    def _find_node_ranks(self) -> list[int]:
        """Return the ranks on this node, found by the marker files in the directory."""
        launch = on_rank_0(lambda: f".seen-{time.time_ns():x}-", self._control)
        mark = self._directory / f"{launch}{self._rank}"
        problem = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = f"{self._directory} cannot be written ({error.strerror})"
        gather(None, self._control)  # wait until all ranks have written their file
        seen = sorted(
            int(path.name.removeprefix(launch)) for path in self._directory.glob(f"{launch}*")
        )
        answers = gather((problem, seen), self._control)
        with suppress(OSError):  # `problem` says why it could not be written
            mark.unlink(missing_ok=True)
        problems = [text for text, _ in answers if text] or [
            f"ranks {rank} and {other} do not see the same files in {self._directory}"
            for rank, (_, ranks) in enumerate(answers)
            for other in ranks
            if answers[other][1] != ranks
        ]
        if problems:
            raise UsageError(
                f"--ckpt-local-dir: {problems[0]}", expected="a directory on each node's own disk"
            )
        return seen

    def _write_shards(self, attempt: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
        directory = attempt / _shard_directory(self._rank)
        attempt.mkdir(parents=True, exist_ok=True)
        partial_dirs.mark_path(attempt).touch()
        directory.mkdir(parents=True)
        writer = HashingWriter(directory)
        with unwrap_dcp_errors():
            dcp.save(get_local_tensors(snapshot), storage_writer=writer, no_dist=True)
        publish.fsync(directory)
        return writer.entries(_shard_directory(self._rank))

    def _seal(
        self, attempt: Path, snapshot: Snapshot, files: list[dict[str, Any]], save: str
    ) -> None:
        if not self._is_node_leader:
            return
        manifest.write_json(attempt / commit.TRAIN_STATE, select_saved(snapshot.record))
        files = [*files, manifest.file_entry(attempt, attempt / commit.TRAIN_STATE, "sha256")]
        commit.seal_attempt(
            attempt,
            snapshot.step,
            files,
            snapshot.identity,
            self._ranks,
            select_facts(snapshot.record) | {"save": save, "ranks": self._node},
        )


def _shard_directory(rank: int) -> str:
    return f"{commit.TENSORS}/rank_{rank:05d}"


def open_tier(run: SavedRun, place: str, shared_every: int) -> Tier:
    """Return the second tier in a place; see vendor_tiers.py.

    shared_every: steps between checkpoints in the run's directory.
    """
    vendor, address = vendor_tiers.split_place(place)
    make = pkgutil.resolve_name(vendor.tier) if vendor else LocalTier
    tier: Tier = make(run, address, max(1, shared_every // _TIER_PER_SHARED))
    return tier
