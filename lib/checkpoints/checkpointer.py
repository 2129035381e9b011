"""Save the state of a run at the right steps, find its newest checkpoint, and handle failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from lib.checkpoints import contents, snapshot
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import RunState, TrainRecord
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.place import CheckpointPlace, SavedRun
from lib.checkpoints.run_directory import RunDirectory
from lib.checkpoints.snapshot import Snapshot
from lib.core import log, units, workers
from lib.core.errors import ArtifactError, DiskFullError, StageError
from lib.parallel.layout import gather
from lib.runs.events import Event

_MAX_FAILURES = 3  # saves in a row without disk space
_HINT = (
    "free disk space there, or keep fewer checkpoints with --ckpt-keep. "
    "Kept checkpoints and those in quarantine/ are never deleted to make space"
)


class Saved(NamedTuple):
    """A checkpoint that is complete, its place, and the seconds that the save took."""

    place: CheckpointPlace
    checkpoint: Checkpoint
    seconds: float


class Checkpointer:
    """Saves the state of a run, one checkpoint at a time, and finds the one to resume from.

    Every save, and everything that follows it, runs in a separate thread and uses a separate
    process group. All ranks must call every method.
    """

    def __init__(
        self,
        run: SavedRun,
        places: Sequence[CheckpointPlace],
        total_steps: int,
        free_memory: Callable[[], float] | None = None,
    ) -> None:
        """Create the checkpointer of a run.

        places: first the directory of the run, which gets the last step too. A step for which
        several places are due is saved in the first one of them. free_memory: returns the bytes of
        host memory that a rank can still use for copies; if it is None, each checkpoint is written
        before the next step.
        """
        assert isinstance(places[0], RunDirectory), "the run relies on the first place"
        self._run = run
        self._directory = places[0]
        self._tiers = places[1:]
        self._places = places
        self._total = total_steps
        self._free_memory = free_memory
        self._copies: HostCopies | None = None
        self._thread = workers.thread_pool(name="saving")
        self._pending: Future[Saved] | None = None
        self._step = 0
        self._place: CheckpointPlace = self._directory  # of the pending save
        self._saved: int | None = None  # step of the last complete checkpoint in the directory
        self._failures = 0
        self._waited: float | None = None  # seconds that training waited for the save

    def find_newest(self, before: int | None = None) -> Checkpoint | None:
        """Return the newest valid checkpoint of all places; see `find_newest_valid`."""
        # No hashing yet: if a tier has a newer one, the files in the directory need not be read.
        seen = self._directory.peek_newest(before) if self._tiers else 0
        if newer := self._find_in_tiers(before, seen):
            return newer
        try:
            newest = self._directory.find_newest(before)
        except ArtifactError:
            if seen and (newer := self._find_in_tiers(before, 0)):
                return newer
            raise
        step = newest.step if newest else 0
        return (self._find_in_tiers(before, step) if step < seen else None) or newest

    def _find_in_tiers(self, before: int | None, after: int) -> Checkpoint | None:
        """Return a valid checkpoint of the first tier that has one after a step."""
        found = (tier.find_newest(before, after) for tier in self._tiers)
        return next(filter(None, found), None)

    def load(self, checkpoint: Checkpoint, state: RunState) -> TrainRecord:
        """Load a verified checkpoint into the state of a run and return its record.

        Raises ArtifactError if something is missing, or if names, shapes or dtypes differ.
        """
        record = checkpoint.record()
        tensors = state.tensors()
        contents.require_complete(record, checkpoint.path)
        place = next(place for place in reversed(self._places) if place.holds(checkpoint))
        place.load(checkpoint, tensors, record)
        state.load_state_dict(record)
        return record

    def drop_newer(self, step: int, why: str, tier_step: int | None = None) -> None:
        """Make all checkpoints after a step unusable, because the run continues from that step.

        tier_step: use this step instead for all places except the run's directory. Raises
        ArtifactError if one of these fails.
        """
        self._directory.drop_newer(step, why)
        for tier in self._tiers:
            tier.drop_newer(step if tier_step is None else tier_step, why)

    def clear(self, step: int) -> None:
        """Delete the checkpoints that are useless after the last step of a complete run."""
        for place in self._places:
            place.clear(step)

    def start(self, step: int) -> None:
        """Begin what runs beside the training, such as copying; the run continues after a step."""
        for place in self._places:
            place.start(step)

    def stop(
        self, patience: float, is_stopped: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        """Wait at most `patience` seconds for what runs beside the training, then end it.

        is_stopped: called on all ranks; returns on all of them whether one must stop waiting. beat:
        called now and then on all ranks, to show a watchdog that they wait.
        """
        for place in self._places:
            place.stop(patience, is_stopped, beat)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, in any place."""
        return step == self._total or any(place.is_due(step) for place in self._places)

    def save(self, state: RunState, stopping: bool = False) -> Future[Saved] | None:
        """Start to save the state after a step, and wait for the save if the step is the last one.

        After the call, the caller may change the state. stopping: the run ends here; if the step is
        saved already, this only waits until that save is complete, and returns None. Otherwise it
        returns the save. Raises the error of the previous save or of this one; see `finish`.
        """
        began = time.monotonic()
        last = stopping or state.step == self._total
        self.finish(wait=True)
        if stopping and self._saved == state.step:
            return None
        copies = None if last else self._get_copies(state)
        self._step = state.step
        self._waited = None
        due = (place for place in self._places if place.is_due(state.step))
        self._place = self._directory if last else next(due)
        captured = snapshot.capture_snapshot(
            state.tensors(), state.state_dict(), self._run.identity, self._run.layout.device, copies
        )
        save = self._thread.submit(self._save, captured, self._place)
        self._pending = save
        if copies is None:
            self.finish(wait=True, last=last)
        else:
            self._waited = time.monotonic() - began
            log.to_file(
                f"step {state.step:,}: saving in the background from a copy of "
                f"{units.size(copies.bytes)} in host memory"
            )
        return save

    def record_evaluation(self, step: int, facts: Mapping[str, Any]) -> Future[Saved | None]:
        """Add the figures of an evaluation to the checkpoint of this step, if it has one.

        This follows the save of the step in its thread. facts: see `commit.record_evaluation`.
        Returns the save, whose result is None if no checkpoint was waiting for the figures.
        """

        def record() -> Saved | None:
            began = time.monotonic()
            checkpoint = self._directory.record_evaluation(step, facts)
            if checkpoint is None:
                return None
            return Saved(self._directory, checkpoint, time.monotonic() - began)

        save = self._thread.submit(record)
        if step == self._total:
            save.result()
        return save

    def poll(self, state: RunState) -> None:
        """Report the last background save, if it is done, and prepare the next one."""
        self.finish(wait=False)
        if min(place.every for place in self._places) < self._total:
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
            saved = pending.result()
        except StageError as error:
            self._handle_failure(error, last)
            return
        if saved.place.is_required:
            self._failures = 0
            self._saved = self._step
        if wait:  # also for those who follow the save, in its thread
            self._thread.submit(lambda: None).result()
        duration = units.duration(saved.seconds)
        text = f"step {self._step:,}: saved {saved.checkpoint.path} in {duration}"
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
        refusals = gather(self._copies.describe_refusal(), self._run.layout.control)
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
        if not self._place.is_required:
            self._run.note(Event.LOCAL_SAVE_FAILED, self._step, reason=error.problem)
            log.warn(f"step {self._step} is not saved to {self._place.where}: {error.problem}")
            return
        if not isinstance(error, DiskFullError):
            raise error
        self._failures += 1
        self._run.note(Event.DISK_FULL, self._step, reason=error.problem)
        if last or self._failures >= _MAX_FAILURES:
            error.hint = error.hint or _HINT
            raise error
        log.warn(
            f"step {self._step} is NOT SAVED: {error.problem} ({error.found}). Training "
            f"continues, and ends with exit code 4 after {_MAX_FAILURES} such saves in a row"
        )

    def _save(self, captured: Snapshot, place: CheckpointPlace) -> Saved:
        """Write a checkpoint, and do what follows a save. Runs in the saving thread."""
        began = time.monotonic()
        checkpoint = place.write(captured)
        seconds = time.monotonic() - began
        self._run.note(Event.SAVE, captured.step, path=place.describe(checkpoint))
        place.finish_save(captured.step)
        return Saved(place, checkpoint, seconds)
