"""Keep checkpoints in the directory of the run, which all ranks share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from lib.checkpoints import commit, snapshot
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord
from lib.checkpoints.place import CheckpointPlace, SavedRun
from lib.checkpoints.search import find_newest_valid
from lib.checkpoints.snapshot import Snapshot
from lib.core import log, paths
from lib.core.errors import DiskFullError, StageError
from lib.parallel.layout import on_rank_0
from lib.runs.events import Event


class RunDirectory(CheckpointPlace):
    """The checkpoints that a run relies on."""

    is_required = True

    def __init__(self, run: SavedRun, checkpoints: Path, every: int, keep: int = 0) -> None:
        """checkpoints: the directory. keep: see `commit.prune_checkpoints`."""
        super().__init__(run, every)
        self.where = str(checkpoints)
        self._directory = checkpoints
        self._keep = keep
        self._pruning = Lock()
        self._prune_may_fail = log.WarnOnce("old checkpoints", OSError, StageError, done="deleted")
        self._record_may_fail = log.WarnOnce("the figures of an evaluation", OSError)

    def write(self, snapshot_: Snapshot) -> Checkpoint:
        """Write a checkpoint; if the disk is full, free space and try again."""
        group = self.run.layout.saving
        try:
            on_rank_0(lambda: commit.require_space(self._directory), group)
            return snapshot.write_snapshot(self._directory, snapshot_, group)
        except DiskFullError:
            if not on_rank_0(lambda: self._free_space(snapshot_.step), group):
                raise
            return snapshot.write_snapshot(self._directory, snapshot_, group)

    def finish_save(self, step: int) -> None:
        """Delete checkpoints that retention drops."""
        if self.run.layout.rank == 0:
            self.prune(step)

    def prune(self, step: int, for_space: bool = False) -> bool:
        """Delete checkpoints that retention drops; return whether any were deleted.

        for_space: also delete one that is in use elsewhere. Any thread of rank 0 may call this.
        """
        deleted: list[int] = []
        with self._prune_may_fail, self._pruning:
            spared = () if for_space else self._list_spared()
            deleted = commit.prune_checkpoints(self._directory, self._keep, spared)
        if deleted:
            self.run.note(Event.PRUNE, step, steps=deleted)
        return bool(deleted)

    def _list_spared(self) -> Collection[int]:
        """Return the steps whose checkpoints must be kept for now."""
        return ()

    def _free_space(self, step: int) -> bool:
        """Delete leftovers and superfluous checkpoints; return whether any were deleted."""
        if deleted := commit.delete_leftovers(self._directory):
            self.run.note(Event.CLEAN, step, paths=deleted)
        return self.prune(step, for_space=True) or bool(deleted)

    def peek_newest(self, before: int | None = None) -> int:
        """Return the step of the newest checkpoint that seems complete, 0 without one.

        Nothing is hashed.
        """
        newest = on_rank_0(
            lambda: commit.find_newest(self._directory, before), self.run.layout.control
        )
        return newest.step if newest else 0

    def find_newest(self, before: int | None = None, after: int = 0) -> Checkpoint | None:
        """Return the newest valid checkpoint, or raise ArtifactError; see `find_newest_valid`."""
        newest = find_newest_valid(
            self._directory, self.run.layout.control, self.note_damaged, before
        )
        return newest if newest and newest.step > after else None

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has the files of a checkpoint of this or another run."""
        return True

    def load(self, checkpoint: Checkpoint, tensors: dict[str, Tensor], record: TrainRecord) -> None:
        """Load the tensors and random states of a checkpoint of this or another run."""
        layout = self.run.layout
        snapshot.load_snapshot(checkpoint, tensors, record, layout.device, layout.control)

    def drop_newer(self, step: int, why: str) -> None:
        """Move the checkpoints after a step to quarantine."""
        if self.run.layout.rank == 0:
            commit.quarantine_newer(self._directory, step, why)

    def describe(self, checkpoint: Checkpoint) -> str:
        """Return the name of a checkpoint in the directory."""
        return checkpoint.path.name

    def record_evaluation(self, step: int, facts: Mapping[str, Any]) -> Checkpoint | None:
        """Write the figures into COMMIT of a checkpoint that waits for them, and return it.

        facts: see `commit.record_evaluation`. Returns None on other ranks than 0.
        """
        if self.run.layout.rank != 0:
            return None
        checkpoint = Checkpoint(self._directory / paths.step_name(step), step)
        with self._record_may_fail:
            if commit.record_evaluation(checkpoint, facts):
                return checkpoint
        return None
