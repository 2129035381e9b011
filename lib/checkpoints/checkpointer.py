"""When the state of a run is saved, where its newest checkpoint is, and what if either fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lib.checkpoints import commit, contents, snapshot
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import Saved, TrainRecord
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.hyperpod import HyperPodTier
from lib.checkpoints.local import LocalTier
from lib.checkpoints.search import newest_valid
from lib.checkpoints.snapshot import Snapshot
from lib.checkpoints.tier import Note, Tier, unnoted
from lib.core import log, units, workers
from lib.core.errors import ArtifactError, DiskFullError, StageError
from lib.parallel.layout import ParallelLayout, gather, on_rank_0

_TIER_PER_SHARED = 10  # checkpoints of the other tier for one that all share
_MOST_FAILURES = 3  # saves in a row for which there was no room
_HINT = (
    "free space there, or keep fewer by --ckpt-keep and --ckpt-keep-every: no room is made "
    "of what these keep, nor of what lies in quarantine/"
)


class Checkpointer:
    """Saves the state of a run, one checkpoint at a time, and finds the one to go on from.

    What is written in the background, and all that follows a save, is done in a thread of its own,
    on a process group that nothing else uses. All ranks must call everything here together.
    """

    def __init__(
        self,
        checkpoints: Path,
        layout: ParallelLayout,
        identity: dict[str, Any],
        *,
        total_steps: int,
        every: int,
        keep: int = 0,
        keep_every: int = 0,
        tier: Tier | None = None,
        tier_every: int | None = None,
        room: Callable[[], float] | None = None,
        note: Note = unnoted,
    ) -> None:
        """identity: what a run that resumes must share. every: steps from one checkpoint to the
        next; the last step is always saved. keep, keep_every: see commit.prune. tier: frequent ones
        beside the shared, each tier_every steps. room: returns the bytes of host memory that a rank
        can still be given for copies; None: a save is written before the next step. note: is told
        what happens.
        """
        self._directory = checkpoints
        self._layout = layout
        self._identity = identity
        self._total = total_steps
        self._every = every
        self._keep = (keep, keep_every)
        self._often = every if tier is None else tier_every or max(1, every // _TIER_PER_SHARED)
        self._tier = tier
        self._note = note
        self._room = room
        self._copies: HostCopies | None = None
        self._thread = workers.thread_pool(name="saving")
        self._pending: Future[tuple[Checkpoint, float]] | None = None
        self._step = 0
        self._is_shared = True
        self._failures = 0
        self._waited: float | None = None  # seconds that the steps were held up by the save
        self._prune_may_fail = log.Tolerated("old checkpoints", OSError, StageError, done="deleted")

    def newest(self, before: int | None = None) -> Checkpoint | None:
        """Return the newest valid checkpoint of both tiers; see newest_valid."""
        control = self._layout.control
        tier = self._tier
        if tier is None:
            return newest_valid(self._directory, control, self._note_quarantine, before)

        def newer_in_tier(than: int) -> Checkpoint | None:
            return tier.newest_valid(self._identity, than, self._note_quarantine, before)

        # Not hashed yet: a shared file system need not be read when the nodes have something newer.
        likely = on_rank_0(
            lambda: next(
                (
                    c.step
                    for c in commit.scan(self._directory)
                    if not c.problems() and (before is None or c.step <= before)
                ),
                0,
            ),
            control,
        )
        if found := newer_in_tier(likely):
            return found
        error = None
        try:
            shared = newest_valid(self._directory, control, self._note_quarantine, before)
        except ArtifactError as damaged:
            shared = None
            error = damaged
        step = shared.step if shared else 0
        if step < likely and (found := newer_in_tier(step)):
            return found
        if error:
            raise error
        return shared

    def load(self, checkpoint: Checkpoint, state: Saved) -> TrainRecord:
        """Fill a run's state from a verified checkpoint; return its record.

        Raises ArtifactError when it lacks something, or when names, shapes or dtypes differ.
        """
        record = checkpoint.record()
        tensors = state.tensors()
        contents.require_complete(record, checkpoint.path)
        if self._tier and self._tier.holds(checkpoint):
            self._tier.fill(checkpoint, tensors, self._layout.device)
        else:
            snapshot.fill(checkpoint, tensors, record, self._layout.device, self._layout.control)
        state.load_state_dict(record)
        return record

    def supersede(self, step: int, why: str, tier_step: int | None = None) -> None:
        """Set aside what is newer than the step that the run goes on from.

        tier_step: the step for the other tier, if it is another. Raises ArtifactError when that
        tier cannot.
        """
        if self._layout.rank == 0:
            commit.supersede(self._directory, step, why)
        if self._tier:
            self._tier.supersede(step if tier_step is None else tier_step, why)

    def remove_tier(self, step: int) -> None:
        """Delete the checkpoints of the other tier: the run is complete, at this step."""
        if self._tier:
            self._tier.remove(step)

    def is_due(self, step: int) -> bool:
        """Tell whether a step is saved, in either tier."""
        return step == self._total or step % self._every == 0 or step % self._often == 0

    def save(
        self,
        state: Saved,
        stopping: bool = False,
        after: Callable[[bool], None] = lambda is_shared: None,
    ) -> None:
        """Begin to save a step, and wait for it if it is the last; so the state may be changed.

        stopping: the run ends here. after: called in the thread of rank 0 when the checkpoint is
        there, with whether all ranks share it; it must not raise. Raises what the save before, or
        this one, raised; see `finish`.
        """
        began = time.monotonic()
        last = stopping or state.step == self._total
        self.finish(wait=True)
        copies = None if last else self._copies_of(state)
        self._step = state.step
        self._waited = None
        self._is_shared = last or state.step % self._every == 0
        captured = snapshot.capture(
            state.tensors(), state.state_dict(), self._identity, self._layout.device, copies
        )
        self._pending = self._thread.submit(self._save, captured, self._is_shared, after)
        if copies is None:
            self.finish(wait=True, last=last)
        else:
            self._waited = time.monotonic() - began
            log.to_file(
                f"step {state.step:,}: saving in the background from a copy of "
                f"{units.size(copies.bytes)} in host memory"
            )

    def poll(self, state: Saved) -> None:
        """Report how the last background save ended, if one has, and prepare the next one."""
        self.finish(wait=False)
        if self._often < self._total:
            self._prepare(state)

    def finish(self, wait: bool, last: bool = False) -> None:
        """Say how a save has ended, if one has.

        wait: for one that is still being written. last: the run ends with it. Raises what the save
        raised; DiskFullError only when several in a row, or the last one, found no room.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending = self._pending
        self._pending = None
        try:
            checkpoint, seconds = pending.result()
        except StageError as error:
            self._failed(error, last)
            return
        if self._is_shared:
            self._failures = 0
        waited = (
            ""
            if self._waited is None or self._copies is None
            else ", in the background; "
            f"the steps waited {units.duration(self._waited + self._copies.waited)}"
        )
        log.info(
            f"step {self._step:,}: saved {checkpoint.path} in {units.duration(seconds)}{waited}"
        )

    def _prepare(self, state: Saved) -> None:
        """Begin, once, to make room in host memory for what is saved in the background."""
        if self._room is not None and self._copies is None:
            self._copies = HostCopies(state.optimizer, self._room)
            self._copies.prepare(state.tensors())

    def _copies_of(self, state: Saved) -> HostCopies | None:
        """Return where the state is copied to, None from now on if a rank has no room for it."""
        self._prepare(state)
        if self._copies is None:
            return None
        refusals = gather(self._copies.refusal(), self._layout.control)
        if refused := [rank for rank, why in enumerate(refusals) if why]:
            self._copies = None
            self._room = None
            log.warn(
                f"checkpoints are written before the next step, not in the background: "
                f"{refusals[refused[0]]} (rank {refused[0]})"
            )
        return self._copies

    def _failed(self, error: StageError, last: bool) -> None:
        """Tell of a save that failed, or raise the error where the run cannot go on without."""
        if self._tier and not self._is_shared:  # the shared ones are what the run relies on
            self._note("local_save_failed", self._step, reason=error.problem)
            log.warn(f"step {self._step} is not saved in {self._tier.where}: {error.problem}")
            return
        if not isinstance(error, DiskFullError):
            raise error
        self._failures += 1
        self._note("disk_full", self._step, reason=error.problem)
        if last or self._failures >= _MOST_FAILURES:
            error.hint = error.hint or _HINT
            raise error
        log.warn(
            f"step {self._step} is NOT SAVED: {error.problem} ({error.found}); training "
            f"goes on, and ends with exit code 4 after {_MOST_FAILURES} such saves"
        )

    def _save(
        self, captured: Snapshot, is_shared: bool, after: Callable[[bool], None]
    ) -> tuple[Checkpoint, float]:
        """Return the checkpoint that was written, and in how many seconds; in the thread."""
        began = time.monotonic()
        if is_shared or self._tier is None:
            checkpoint = self._write(captured)
        else:
            checkpoint = self._tier.write(captured)
        seconds = time.monotonic() - began
        self._note(
            "save", captured.step, path=checkpoint.path.name if is_shared else str(checkpoint.path)
        )
        if self._layout.rank == 0:
            if is_shared:
                self._prune(captured.step)
            after(is_shared)
        return checkpoint, seconds

    def _write(self, captured: Snapshot) -> Checkpoint:
        """Commit a snapshot, making room first where that helps."""
        group = self._layout.saving
        try:
            on_rank_0(lambda: commit.require_room(self._directory), group)
            return snapshot.write(self._directory, captured, group)
        except DiskFullError:
            if not on_rank_0(lambda: self._make_room(captured.step), group):
                raise
            return snapshot.write(self._directory, captured, group)

    def _make_room(self, step: int) -> bool:
        """Delete leftovers and checkpoints that retention drops. Return whether it deleted any."""
        if gone := commit.clean(self._directory):
            self._note("clean", step, paths=gone)
        return self._prune(step) or bool(gone)

    def _prune(self, step: int) -> bool:
        """Delete what the keep rules let go; tell whether any went."""
        gone: list[int] = []
        with self._prune_may_fail:
            gone = commit.prune(self._directory, *self._keep)
        if gone:
            self._note("prune", step, steps=gone)
        return bool(gone)

    def _note_quarantine(self, step: int, why: str) -> None:
        self._note("quarantine", step, reason=why)


def make_tier(
    hyperpod: str | None,
    local_dir: Path | None,
    experiment: str,
    run: str,
    layout: ParallelLayout,
    note: Note,
) -> Tier | None:
    """Return where frequent checkpoints go, if anywhere.

    hyperpod: see HyperPodTier. experiment, run: the name of the run, and its mark.
    """
    if hyperpod:
        return HyperPodTier(hyperpod, experiment, run, layout.control, layout.saving, note)
    if local_dir:
        return LocalTier(local_dir / f"{experiment}-{run}", layout.control, layout.saving, note)
    return None
