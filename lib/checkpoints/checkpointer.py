"""Save the state of a run at the right steps, find its newest checkpoint, and handle failures."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any

from lib.checkpoints import commit, contents, snapshot
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import RunState, TrainRecord
from lib.checkpoints.copier import Copier
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.search import find_newest_valid
from lib.checkpoints.snapshot import Snapshot
from lib.checkpoints.tier import LocalTier, Note, Tier, ignore_event
from lib.checkpoints.vendor_tiers import VENDOR_TIERS
from lib.core import log, paths, units, workers
from lib.core.errors import ArtifactError, DiskFullError, StageError
from lib.parallel.layout import ParallelLayout, gather, on_rank_0
from lib.runs.events import Event

_TIER_PER_SHARED = 10  # checkpoints of the second tier for each shared one
_MAX_FAILURES = 3  # saves in a row without disk space
_HINT = (
    "free disk space there, or keep fewer checkpoints with --ckpt-keep and --ckpt-keep-every. "
    "Kept checkpoints and those in quarantine/ are never deleted to make space"
)


class Checkpointer:
    """Saves the state of a run, one checkpoint at a time, and finds the one to resume from.

    Every save, and everything that follows it, runs in a separate thread and uses a separate
    process group. All ranks must call every method.
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
        free_memory: Callable[[], float] | None = None,
        copier: Copier | None = None,
        note: Note = ignore_event,
    ) -> None:
        """Create the checkpointer of a run.

        identity: options and inputs that a resumed run must share with this run. every: steps
        between shared checkpoints; the last step is always saved. keep, keep_every: see
        prune_checkpoints. tier: stores frequent checkpoints in addition to the shared ones, every
        tier_every steps. free_memory: returns the bytes of host memory that a rank can still use
        for copies; if it is None, each checkpoint is written before the next step. copier: copies
        the shared checkpoints to a second place, on rank 0. note: records events.
        """
        self._directory = checkpoints
        self._layout = layout
        self._identity = identity
        self._total = total_steps
        self._every = every
        self._keep = (keep, keep_every)
        self._tier_every = (
            every if tier is None else tier_every or max(1, every // _TIER_PER_SHARED)
        )
        self._tier = tier
        self._note = note
        self._free_memory = free_memory
        self._copier = copier
        self._pruning = Lock()
        self._copies: HostCopies | None = None
        self._thread = workers.thread_pool(name="saving")
        self._pending: Future[tuple[Checkpoint, float]] | None = None
        self._step = 0
        self._saved: int | None = None  # step of the last complete shared checkpoint
        self._is_shared = True
        self._failures = 0
        self._waited: float | None = None  # seconds that training waited for the save
        self._record_may_fail = log.WarnOnce("the figures of an evaluation", OSError)
        self._prune_may_fail = log.WarnOnce("old checkpoints", OSError, StageError, done="deleted")

    def find_newest(self, before: int | None = None) -> Checkpoint | None:
        """Return the newest valid checkpoint of both tiers; see `find_newest_valid`."""
        control = self._layout.control
        tier = self._tier
        if tier is None:
            return find_newest_valid(self._directory, control, self._note_quarantine, before)

        def find_in_tier(after: int) -> Checkpoint | None:
            return tier.find_usable(self._identity, after, self._note_quarantine, before)

        # No hashing yet: if the tier has a newer one, the shared files need not be read.
        unverified = on_rank_0(lambda: commit.find_newest(self._directory, before), control)
        unverified_step = unverified.step if unverified else 0
        if newer := find_in_tier(unverified_step):
            return newer
        error = None
        try:
            shared = find_newest_valid(self._directory, control, self._note_quarantine, before)
        except ArtifactError as damaged:
            shared = None
            error = damaged
        step = shared.step if shared else 0
        if step < unverified_step and (newer := find_in_tier(step)):
            return newer
        if error:
            raise error
        return shared

    def load(self, checkpoint: Checkpoint, state: RunState) -> TrainRecord:
        """Load a verified checkpoint into the state of a run and return its record.

        Raises ArtifactError if something is missing, or if names, shapes or dtypes differ.
        """
        record = checkpoint.record()
        tensors = state.tensors()
        contents.require_complete(record, checkpoint.path)
        if self._tier and self._tier.holds(checkpoint):
            self._tier.fill(checkpoint, tensors, self._layout.device)
        else:
            snapshot.load_snapshot(
                checkpoint, tensors, record, self._layout.device, self._layout.control
            )
        state.load_state_dict(record)
        return record

    def drop_newer(self, step: int, why: str, tier_step: int | None = None) -> None:
        """Make all checkpoints after a step unusable, because the run continues from that step.

        Shared ones are moved to quarantine; see `Tier.drop_newer` for the second tier. tier_step:
        use this step instead for the second tier. Raises ArtifactError if the second tier fails.
        """
        if self._layout.rank == 0:
            commit.quarantine_newer(self._directory, step, why)
        if self._copier:
            self._copier.retire(step)
        if self._tier:
            self._tier.drop_newer(step if tier_step is None else tier_step, why)

    def delete_tier_checkpoints(self, step: int) -> None:
        """Delete the checkpoints of the second tier after the last step of a complete run."""
        if self._tier:
            self._tier.delete_all(step)

    def start_copying(self, step: int) -> None:
        """Begin to copy shared checkpoints to the second place; the run continues after a step."""
        if self._copier:
            self._copier.start(step, self._prune)

    def finish_copying(
        self, patience: float, is_stopped: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        """Wait at most `patience` seconds for the copy of the newest checkpoint, then stop copying.

        is_stopped: called on all ranks; returns on all of them whether one must stop waiting. beat:
        called now and then on all ranks, to show a watchdog that they wait. All ranks must call
        this, and none waits longer in a collective than rank 0 needs for its answer.
        """
        deadline = time.monotonic() + patience

        def is_over() -> bool:
            if self._copier is None:
                return True
            if self._copier.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                return True
            return time.monotonic() > deadline or self._copier.has_given_up()

        if self._copier:
            self._copier.hurry(patience)
        while not (on_rank_0(is_over, self._layout.control) or is_stopped()):
            beat()
        if self._copier:
            self._copier.close()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, shared or in the second tier."""
        return step == self._total or step % self._every == 0 or step % self._tier_every == 0

    def save(
        self,
        state: RunState,
        stopping: bool = False,
        after: Callable[[bool], None] = lambda is_shared: None,
    ) -> None:
        """Start to save the state after a step, and wait for the save if the step is the last one.

        After the call, the caller may change the state. stopping: the run ends here; if the step is
        saved already, this only waits until that save is complete. after: called
        as `after(is_shared)` in the saving thread of rank 0 once the checkpoint is complete; it
        must not raise. Raises the error of the previous save or of this one; see `finish`.
        """
        began = time.monotonic()
        last = stopping or state.step == self._total
        self.finish(wait=True)
        if stopping and self._saved == state.step:
            return
        copies = None if last else self._get_copies(state)
        self._step = state.step
        self._waited = None
        self._is_shared = last or state.step % self._every == 0
        captured = snapshot.capture_snapshot(
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

    def record_evaluation(
        self,
        step: int,
        facts: Mapping[str, Any],
        after: Callable[[bool], None] = lambda is_shared: None,
    ) -> None:
        """Add the figures of an evaluation to the checkpoint of this step, if it has one.

        This follows the save of the step in its thread. facts, after: see
        `commit.record_evaluation` and `save`.
        """

        def record() -> None:
            checkpoint = Checkpoint(self._directory / paths.step_name(step), step)
            with self._record_may_fail:
                if commit.record_evaluation(checkpoint, facts):
                    after(True)
                    if self._copier:
                        self._copier.wake()

        if self._layout.rank == 0:
            task = self._thread.submit(record)
            if step == self._total:
                task.result()

    def poll(self, state: RunState) -> None:
        """Report the last background save, if it is done, and prepare the next one."""
        self.finish(wait=False)
        if self._tier_every < self._total:
            self._prepare(state)

    def finish(self, wait: bool, last: bool = False) -> None:
        """Report the result of the pending save, if there is one.

        wait: wait for a save that is not done. last: the run ends with this save. Raises the error
        of the save, but DiskFullError only if it was the last save or one of several in a row.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending = self._pending
        self._pending = None
        try:
            checkpoint, seconds = pending.result()
        except StageError as error:
            self._handle_failure(error, last)
            return
        if self._is_shared:
            self._failures = 0
            self._saved = self._step
        text = f"step {self._step:,}: saved {checkpoint.path} in {units.duration(seconds)}"
        if self._waited is not None and self._copies is not None:
            waited = units.duration(self._waited + self._copies.waited)
            text += f", in the background; training waited {waited}"
        log.info(text)

    def _prepare(self, state: RunState) -> None:
        """Start to allocate host memory for the copies of background saves, if not done before."""
        if self._free_memory is not None and self._copies is None:
            self._copies = HostCopies(state.optimizer, self._free_memory)
            self._copies.prepare(state.tensors())

    def _get_copies(self, state: RunState) -> HostCopies | None:
        """Return the memory for copies, or None if saves cannot run in the background.

        If a rank does not have enough memory, this and all later calls return None.
        """
        self._prepare(state)
        if self._copies is None:
            return None
        refusals = gather(self._copies.describe_refusal(), self._layout.control)
        if refused := [rank for rank, why in enumerate(refusals) if why]:
            self._copies = None
            self._free_memory = None
            log.warn(
                f"checkpoints are written before the next step, not in the background: "
                f"{refusals[refused[0]]} (rank {refused[0]})"
            )
        return self._copies

    def _handle_failure(self, error: StageError, last: bool) -> None:
        """Warn about a failed save, or raise its error if the run must end."""
        if self._tier and not self._is_shared:  # the run relies on the shared ones only
            self._note(Event.LOCAL_SAVE_FAILED, self._step, reason=error.problem)
            log.warn(f"step {self._step} is not saved to {self._tier.where}: {error.problem}")
            return
        if not isinstance(error, DiskFullError):
            raise error
        self._failures += 1
        self._note(Event.DISK_FULL, self._step, reason=error.problem)
        if last or self._failures >= _MAX_FAILURES:
            error.hint = error.hint or _HINT
            raise error
        log.warn(
            f"step {self._step} is NOT SAVED: {error.problem} ({error.found}). Training "
            f"continues, and ends with exit code 4 after {_MAX_FAILURES} such saves in a row"
        )

    def _save(
        self, captured: Snapshot, is_shared: bool, after: Callable[[bool], None]
    ) -> tuple[Checkpoint, float]:
        """Write a checkpoint; return it and the seconds that it took. Runs in the saving thread."""
        began = time.monotonic()
        if is_shared or self._tier is None:
            checkpoint = self._write(captured)
        else:
            checkpoint = self._tier.write(captured)
        seconds = time.monotonic() - began
        self._note(
            Event.SAVE,
            captured.step,
            path=checkpoint.path.name if is_shared else str(checkpoint.path),
        )
        if self._layout.rank == 0:
            if is_shared:
                self._prune(captured.step)
            after(is_shared)
            if is_shared and self._copier:
                self._copier.wake()
        return checkpoint, seconds

    def _write(self, captured: Snapshot) -> Checkpoint:
        """Write a shared checkpoint; if the disk is full, free space and try again."""
        group = self._layout.saving
        try:
            on_rank_0(lambda: commit.require_space(self._directory), group)
            return snapshot.write_snapshot(self._directory, captured, group)
        except DiskFullError:
            if not on_rank_0(lambda: self._free_space(captured.step), group):
                raise
            return snapshot.write_snapshot(self._directory, captured, group)

    def _free_space(self, step: int) -> bool:
        """Delete leftovers and superfluous checkpoints; return whether any were deleted."""
        if deleted := commit.delete_leftovers(self._directory):
            self._note(Event.CLEAN, step, paths=deleted)
        return self._prune(step, spare_copied=False) or bool(deleted)

    def _prune(self, step: int, spare_copied: bool = True) -> bool:
        """Delete checkpoints that retention drops; return whether any were deleted.

        spare_copied: keep the one that is being copied to the second place. Any thread may call
        this.
        """
        deleted: list[int] = []
        with self._prune_may_fail, self._pruning:
            spared = self._copier.get_current() if self._copier and spare_copied else ()
            deleted = commit.prune_checkpoints(self._directory, *self._keep, spared)
        if deleted:
            self._note(Event.PRUNE, step, steps=deleted)
        return bool(deleted)

    def _note_quarantine(self, step: int, why: str) -> None:
        self._note(Event.QUARANTINE, step, reason=why)


def make_tier(
    vendor: tuple[str, str] | None,
    local_dir: Path | None,
    experiment: str,
    run: str,
    layout: ParallelLayout,
    note: Note,
) -> Tier | None:
    """Return the second tier for frequent checkpoints, or None if no option asks for one.

    vendor: see vendor_tiers.find_requested. experiment, run: the experiment's name, the run's ID.
    """
    if vendor:
        name, address = vendor
        make = pkgutil.resolve_name(VENDOR_TIERS[name].tier)
        tier: Tier = make(address, experiment, run, layout.control, layout.saving, note)
        return tier
    if local_dir:
        return LocalTier(local_dir / f"{experiment}-{run}", layout.control, layout.saving, note)
    return None
