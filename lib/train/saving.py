"""When and how checkpoints are saved: in the background, kept or deleted, and what if they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.save import Snapshot, write
from lib.checkpoints.staging import HostCopies
from lib.checkpoints.tier import Tier
from lib.core import log, units, workers
from lib.core.errors import DiskFullError, StageError
from lib.core.paths import Experiment
from lib.parallel.layout import gather, on_rank_0
from lib.planning import capacity
from lib.train.config import Config
from lib.train.journal import Journal

_MOST_FAILURES = 3  # saves in a row for which there was no room
_HINT = "free space there, or keep fewer by --ckpt-keep and --ckpt-keep-every: no room is made " \
        "of what these keep, nor of what lies in quarantine/"


class Saves:
    """Writes one checkpoint at a time, on a process group that nothing else uses.

    All that follows a save is done in its thread, by rank 0. waited: seconds that the steps were
    held up by the save in the background. tier: frequent ones beside the shared, None without
    --ckpt-local-dir or --ckpt-hyperpod. copies: where the state is copied to, None when a
    save is written before the next step (--ckpt-async off, or no room for copies).
    """

    def __init__(self, config: Config, experiment: Experiment, journal: Journal,
                 group: dist.ProcessGroup, tier: Tier | None) -> None:
        self._config, self._experiment, self._journal = config, experiment, journal
        self._group, self.tier, self._local = group, tier, False
        self.copies = HostCopies(lambda: capacity.room(torch.device("cpu"))) if config.ckpt_async \
            else None
        self._thread = workers.thread_pool(name="saving")
        self._pending: Future[tuple[Checkpoint, float]] | None = None
        self._step, self._failures = 0, 0
        self.waited: float | None = None
        self._prune_may_fail = log.Tolerated("old checkpoints", OSError, StageError,
                                             done="deleted")

    def require_copies(self, control: dist.ProcessGroup) -> None:
        """Save without copies from now on if a rank has no room for them; all ranks call this."""
        if self.copies is None:
            return
        refusals = gather(self.copies.refusal(), control)
        if refused := [rank for rank, why in enumerate(refusals) if why]:
            self.copies = None
            log.warn(f"checkpoints are written before the next step, not in the background: "
                     f"{refusals[refused[0]]} (rank {refused[0]})")

    def begin(self, snapshot: Snapshot, local: bool = False,
              after: Callable[[], None] = lambda: None) -> None:
        """Start to write, locally to the other tier; the save before must have been finished.

        after: called in the thread when the checkpoint is there; it must not raise.
        """
        assert self._pending is None, "one save at a time"
        self._local, self.waited, self._step = local, None, snapshot.step
        self._pending = self._thread.submit(self._save, snapshot, local, after)

    def finish(self, wait: bool, last: bool = False) -> None:
        """Say how a save has ended, if one has.

        wait: for one that is still being written; all ranks must do that together. last: the run
        ends with it. Raises what the save raised; DiskFullError only when several in a row, or the
        last one, found no room.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        try:
            checkpoint, seconds = pending.result()
        except StageError as error:
            self._failed(error, last)
            return
        if not self._local:
            self._failures = 0
        waited = "" if self.waited is None else f", in the background; the steps waited " \
            f"{units.duration(self.waited + self.copies.waited)}"
        log.info(f"step {self._step:,}: saved {checkpoint.path} in {units.duration(seconds)}"
                 f"{waited}")

    def _failed(self, error: StageError, last: bool) -> None:
        """Tell of a save that failed, or raise the error where the run cannot go on without."""
        if self._local:  # the shared ones are what the run relies on
            self._journal.event("local_save_failed", self._step, reason=error.problem)
            log.warn(f"step {self._step} is not saved in {self.tier.where}: {error.problem}")
            return
        if not isinstance(error, DiskFullError):
            raise error
        self._failures += 1
        self._journal.event("disk_full", self._step, reason=error.problem)
        if last or self._failures >= _MOST_FAILURES:
            error.hint = error.hint or _HINT
            raise error
        log.warn(f"step {self._step} is NOT SAVED: {error.problem} ({error.found}); training "
                 f"goes on, and ends with exit code 4 after {_MOST_FAILURES} such saves")

    def _save(self, snapshot: Snapshot, local: bool, after: Callable[[], None],
              ) -> tuple[Checkpoint, float]:
        """Return the checkpoint that was written, and in how many seconds; in the thread."""
        began = time.monotonic()
        checkpoint = self.tier.write(snapshot) if local else self._write(snapshot)
        seconds = time.monotonic() - began
        self._journal.event("save", snapshot.step, path=str(checkpoint.path) if local else
                            checkpoint.path.name)
        if log.rank() == 0:
            if not local:
                self._prune(snapshot.step)
            after()
        return checkpoint, seconds

    def _write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit a snapshot, making room first where that helps."""
        directory = self._experiment.checkpoints
        try:
            on_rank_0(lambda: commit.require_room(directory), self._group)
            return write(directory, snapshot, self._group)
        except DiskFullError:
            if not on_rank_0(lambda: self._make_room(snapshot.step), self._group):
                raise
            return write(directory, snapshot, self._group)

    def _make_room(self, step: int) -> bool:
        """Delete leftovers and what the keep rules let go, and nothing else; tell whether any went.
        """
        if gone := commit.clean(self._experiment.checkpoints):
            self._journal.event("clean", step, paths=gone)
        return self._prune(step) or bool(gone)

    def _prune(self, step: int) -> bool:
        """Delete what the keep rules let go; tell whether any went."""
        gone: list[int] = []
        with self._prune_may_fail:
            gone = commit.prune(self._experiment.checkpoints, self._config.ckpt_keep,
                                self._config.ckpt_keep_every or 0)
        if gone:
            self._journal.event("prune", step, steps=gone)
        return bool(gone)
