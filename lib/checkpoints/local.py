"""The second tier on each node's own disk.

Protocol and files are those of commit.py, but that each node commits what its own ranks wrote, and
each rank writes its shards as they are:

    step_00001050/dcp/rank_00003/*.distcp, .metadata       shards and random states of a rank
    step_00001050/train_state.json, manifest.json, COMMIT.json

It exists when every node has committed its part of the same save, and serves as many ranks, on the
same nodes, as wrote it. Everybody else takes the newest shared one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import facts
from lib.checkpoints.snapshot import Snapshot, require_same
from lib.checkpoints.storage import HashingWriter, StrictReader, plain_errors
from lib.checkpoints.tier import Note, Tier, tensors_of, unnoted
from lib.core import log, manifest, partial_dirs, paths, publish
from lib.core.errors import StageError, UsageError
from lib.core.identity import differences
from lib.parallel.layout import gather, on_rank_0, together

_KEEP = 2


class LocalTier(Tier):
    """Checkpoints of one run in a directory that each node has for itself.

    The directory must not be that of another run: its leftovers would be taken for this one's. All
    ranks must call everything here together. `write` talks over the group `saving`, the rest over
    `control`. Raises UsageError when the directory cannot be used.
    """

    where = "the nodes' own disks"

    def __init__(
        self,
        directory: Path,
        control: dist.ProcessGroup,
        saving: dist.ProcessGroup,
        note: Note = unnoted,
    ) -> None:
        self._directory = directory
        self.note = note
        self._control = control
        self._saving = saving
        self._rank = dist.get_rank(control)
        self._ranks = dist.get_world_size(control)
        self._node = self._ranks_that_share()
        self._leads = self._rank == self._node[0]
        self._prune_may_fail = log.Tolerated(
            f"old checkpoints in {directory}", OSError, StageError, done="deleted"
        )
        cleaned = gather(commit.clean(directory) if self._leads else [], control)
        if left := [name for names in cleaned for name in names]:
            note("clean", 0, paths=left, where=self.where)

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit what all ranks captured: on all nodes or on none.

        Raises on every rank what went wrong on any.
        """
        snapshot.ready()
        save = on_rank_0(lambda: f"{time.time_ns():x}", self._saving)
        attempt = self._directory / f"{paths.step_name(snapshot.step)}.tmp-{save}"
        try:
            written = together(lambda: self._write_shards(attempt, snapshot), self._saving)
            files = [entry for rank in self._node for entry in written[rank]]
            together(lambda: self._seal(attempt, snapshot, files, save), self._saving)
        except BaseException:
            commit.remove(attempt)
            raise
        gone = together(lambda: self._publish(attempt, snapshot.step), self._saving)
        self.note_deleted(snapshot.step, gone[0])
        return Checkpoint(self._directory / paths.step_name(snapshot.step), snapshot.step)

    def _publish(self, attempt: Path, step: int) -> list[int]:
        """Name what this node has sealed; return the steps that went for it."""
        if not self._leads:
            return []
        final = attempt.with_name(paths.step_name(step))
        gone = []
        if final.exists():  # of an earlier launch, which some other node has lost
            commit.discard([final])
            gone.append(step)
        commit.give_name(attempt, step)
        with self._prune_may_fail:
            gone += commit.prune(self._directory, _KEEP)
        return gone

    def newest_valid(
        self,
        identity: dict[str, Any],
        after: int,
        quarantined: Callable[[int, str], None],
        before: int | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint that is whole on every node, every byte of it.

        identity: as of the run now; others are left out. after: only a later step than this one.
        before: only this step or an earlier one. A damaged part is moved to quarantine, one that a
        disk fails to read is left where it is, and `quarantined(step, why)` called on rank 0.
        """
        there = self._whole()
        mine = {
            (step, found["save"])
            for step, found in there.items()
            if found["world_size"] == self._ranks
            and found["ranks"] == self._node
            and not differences(found["identity"], identity)
        }
        shared = set.intersection(*gather(mine, self._control))
        for step, _ in sorted(shared, reverse=True):
            if step <= after or (before is not None and step > before):
                continue
            checkpoint = Checkpoint(self._directory / paths.step_name(step), step)
            found, is_read = self._content_problems(checkpoint)
            parts = gather((found, is_read), self._control)
            problems = [text for part, _ in parts for text in part]
            if not problems:
                return checkpoint
            if self._leads and all(is_read for _, is_read in parts):
                commit.quarantine(checkpoint, problems[0])
            if self._rank == 0:
                quarantined(step, f"on a node's own disk: {problems[0]}")
        return None

    def _whole(self) -> dict[int, dict[str, Any]]:
        """Return by step what COMMIT says of those that are whole on this node, as sizes tell.

        A disk that fails to read costs this tier, and never the run, which has the shared ones.
        """
        there = {}
        with log.Tolerated(str(self._directory), StageError, done="read"):
            for checkpoint in commit.scan(self._directory):
                try:
                    if not checkpoint.problems():
                        there[checkpoint.step] = checkpoint.commit()
                except (OSError, StageError) as error:
                    log.warn(f"{checkpoint.path} is left where it is: {error}")
        return there

    def _content_problems(self, checkpoint: Checkpoint) -> tuple[list[str], bool]:
        """Return what this rank found wrong, and whether it could read its part."""
        try:
            return checkpoint.content_problems(self._node.index(self._rank), len(self._node)), True
        except (OSError, StageError) as error:
            return [str(error)], False

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is one of these."""
        return checkpoint.path.parent == self._directory

    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        reader = StrictReader(checkpoint.path / _shards(self._rank))
        require_same(tensors, reader, checkpoint.path)
        with torch.no_grad(), plain_errors():
            dcp.load(tensors, storage_reader=reader, no_dist=True)

    def remove(self, step: int) -> None:
        """Delete them all: the run is complete, at this step."""
        if not self._leads:
            return
        with self._prune_may_fail:
            commit.clean(self._directory)
            there = commit.scan(self._directory)
            commit.discard(c.path for c in there)
            self.note_deleted(step, [c.step for c in there], "the run is complete")
            with suppress(OSError):  # what was set aside stays
                self._directory.rmdir()

    def supersede(self, step: int, why: str) -> None:
        """Set aside what is newer than the step that the run goes on from."""
        if self._leads:
            commit.supersede(self._directory, step, why)

    def _ranks_that_share(self) -> list[int]:
        """Return the ranks that see what this one writes."""
        launch = on_rank_0(lambda: f".seen-{time.time_ns():x}-", self._control)
        mark = self._directory / f"{launch}{self._rank}"
        problem = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = f"{self._directory} cannot be written ({error.strerror})"
        gather(None, self._control)  # all marks are made
        seen = sorted(
            int(path.name.removeprefix(launch)) for path in self._directory.glob(f"{launch}*")
        )
        sets = gather((problem, seen), self._control)
        mark.unlink(missing_ok=True)
        found = [text for text, _ in sets if text] or [
            f"ranks {rank} and {other} do not see the same of {self._directory}"
            for rank, (_, ranks) in enumerate(sets)
            for other in ranks
            if sets[other][1] != ranks
        ]
        if found:
            raise UsageError(
                f"--ckpt-local-dir: {found[0]}", expected="a directory on each node's own disk"
            )
        return seen

    def _write_shards(self, attempt: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
        directory = attempt / _shards(self._rank)
        attempt.mkdir(parents=True, exist_ok=True)
        partial_dirs.mark_path(attempt).touch()
        directory.mkdir(parents=True)
        writer = HashingWriter(directory)
        with plain_errors():
            dcp.save(tensors_of(snapshot), storage_writer=writer, no_dist=True)
        publish.fsync(directory)
        return writer.entries(_shards(self._rank))

    def _seal(
        self, attempt: Path, snapshot: Snapshot, files: list[dict[str, Any]], save: str
    ) -> None:
        if not self._leads:
            return
        manifest.write_json(attempt / commit.TRAIN_STATE, snapshot.record)
        files = [*files, manifest.file_entry(attempt, attempt / commit.TRAIN_STATE, "sha256")]
        commit.seal(
            attempt,
            snapshot.step,
            files,
            snapshot.identity,
            self._ranks,
            facts(snapshot.record) | {"save": save, "ranks": self._node},
        )


def _shards(rank: int) -> str:
    return f"{commit.TENSORS}/rank_{rank:05d}"
