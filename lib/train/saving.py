"""When and how checkpoints are saved: in the background, kept or deleted, and what if they fail."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.collective import on_rank_0
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.save import Snapshot, write
from lib.checkpoints.staging import HostCopies
from lib.checkpoints.tier import Tier
from lib.core import log, units
from lib.core.errors import DiskFullError, StageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.train.journal import Journal

_MOST_FAILURES = 3  # saves in a row for which there was no room


class Saves:
    """Writes one checkpoint at a time, on a process group that nothing else uses.

    waited: seconds that the steps were held up by the save in the background. tier: frequent ones
    beside the shared, None without --ckpt-local-dir or --ckpt-hyperpod. copies:
    None when a save is written before the next step (--ckpt-async off).
    """

    def __init__(self, opts: Options, experiment: Experiment, journal: Journal,
                 group: dist.ProcessGroup, tier: Tier | None) -> None:
        self._opts, self._experiment, self._journal = opts, experiment, journal
        self._group, self.tier, self._local = group, tier, False
        self.copies = HostCopies() if opts.ckpt_async else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._pending: Future[Checkpoint] | None = None
        self._step, self._began, self._failures = 0, 0.0, 0
        self.waited: float | None = None

    def begin(self, snapshot: Snapshot, local: bool = False) -> None:
        """Start to write, locally to the other tier; the save before must have been finished."""
        assert self._pending is None, "one save at a time"
        self._local, self.waited = local, None
        self._step, self._began = snapshot.step, time.monotonic()
        self._pending = self._thread.submit(self.tier.write if local else self._write, snapshot)

    def finish(self, wait: bool, last: bool = False) -> bool:
        """Do what follows a save that has ended; return whether there was one, not local.

        wait: for one that is still being written; all ranks must do that together. last: the run
        ends with it. Raises what the save raised; DiskFullError only when several in a row, or the
        last one, found no room.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return False
        pending, self._pending = self._pending, None
        if self._local:
            self._finish_local(pending)
            return False
        try:
            checkpoint = pending.result()
        except DiskFullError as error:
            self._failures += 1
            self._journal.event("disk_full", self._step, reason=error.problem)
            if last or self._failures >= _MOST_FAILURES:
                raise
            log.warn(f"step {self._step} is NOT SAVED: {error.problem} ({error.found}); training "
                     f"goes on, and ends with exit code 4 after {_MOST_FAILURES} such saves")
            return True
        self._failures = 0
        self._journal.event("save", self._step, path=checkpoint.path.name)
        if log.rank() == 0:
            self._tell(checkpoint)
            self._prune()
        return True

    def _tell(self, checkpoint: Checkpoint) -> None:
        waited = "" if self.waited is None else \
            f", in the background; the steps waited {units.duration(self.waited)}"
        log.info(f"step {self._step:,}: saved {checkpoint.path} in "
                 f"{units.duration(time.monotonic() - self._began)}{waited}")

    def _finish_local(self, pending: Future[Checkpoint]) -> None:
        try:
            checkpoint = pending.result()
        except StageError as error:  # the shared ones are what the run relies on
            self._journal.event("local_save_failed", self._step, reason=error.problem)
            log.warn(f"step {self._step} is not saved in {self.tier.where}: {error.problem}")
            return
        self._journal.event("save", self._step, path=str(checkpoint.path))
        if log.rank() == 0:
            self._tell(checkpoint)

    def _write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit a snapshot, making room first where that helps; in the thread."""
        directory = self._experiment.checkpoints
        try:
            on_rank_0(lambda: commit.require_room(directory), self._group)
            return write(directory, snapshot, self._group)
        except DiskFullError:
            if not on_rank_0(lambda: commit.make_room(directory), self._group):
                raise
            return write(directory, snapshot, self._group)

    def _prune(self) -> None:
        try:
            gone = commit.prune(self._experiment.checkpoints, self._opts.ckpt_keep,
                                self._opts.ckpt_keep_every or 0)
        except OSError as error:
            log.warn(f"old checkpoints could not be deleted: {error}")
            return
        if gone:
            self._journal.event("prune", self._step, steps=gone)
