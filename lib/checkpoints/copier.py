"""Copy each committed checkpoint to a second place in the background, as a best effort.

A thread of rank 0 decides what to copy, and a child process with the lowest priority copies it, so
training waits neither for the disk nor for the network. A failed copy is tried again after a pause,
by a new process with fresh credentials, and no failure ends the run. If copying takes longer than
the time between checkpoints, checkpoints are skipped: the newest checkpoint is always copied next,
and after it the best one by --best-by. Copies are never deleted to save space.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

from lib.checkpoints import commit, copies
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.copy_lease import PlaceLease
from lib.core import liveness, log, paths, units
from lib.core.errors import StageError, UsageError, from_os_error
from lib.core.paths import Experiment
from lib.core.retry import backoff
from lib.core.workers import Worker
from lib.runs.events import Event

if TYPE_CHECKING:  # imports torch, which the child process does without
    from lib.checkpoints.place import Note

_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 600.0
_LONGEST_PAUSE_AT_END_S = 10.0
_ATTEMPTS_AT_END = 3


class Copier:
    """Copies the checkpoints of a run to a second place; only rank 0 creates a copier.

    After `start`, a thread does all work. Errors in it never reach the caller; only `open` raises.
    """

    def __init__(
        self,
        target: str,
        experiment: Experiment,
        run: str,
        *,
        note: Note,
        show: Callable[..., None],
    ) -> None:
        """Create a copier, which copies nothing before `start`.

        target: the value of --ckpt-copy-to. run: the ID of the run. note: records events. show:
        records `copied` and `copy_error` in state.json.
        """
        self._target = target
        self._experiment = experiment
        self._run = run
        self._note = note
        self._show = show
        self._prune_checkpoints: Callable[[int], object] = lambda step: None
        self.where = copies.name_place(target, experiment.root.name, run)
        self._worker: Worker | None = None
        self._copies: dict[int, dict[str, Any]] = {}  # content of COMMIT by step
        self._current: int | None = None  # step that is being copied
        self._retire_after: int | None = None
        self._error = ""
        self._failures = 0
        self._retry_at = 0.0
        self._is_ending = False
        self._is_closed = False
        self._is_idle = False
        self._is_woken = False
        self._wake = Condition()
        self._thread = Thread(target=self._copy_until_closed, name="copies", daemon=True)

    def open(self) -> None:
        """Find the copies that exist already.

        Raises UsageError if a person must change something first, such as wrong credentials. Other
        errors are retried later, after a warning.
        """
        try:
            self._open_place()
        except (StageError, OSError) as error:
            known = from_os_error(error) if isinstance(error, OSError) else error
            if isinstance(known, UsageError):
                known.problem = f"--ckpt-copy-to cannot be used: {known.problem}"
                raise known from error
            self._handle_failure(error)

    def start(self, step: int, prune: Callable[[int], object]) -> None:
        """Begin to copy.

        step: the run continues from this step, so later copies are retired. prune: called with the
        step of each copied checkpoint, because pruning spares a checkpoint during its copy.
        """
        self._retire_after = step
        self._prune_checkpoints = prune
        self._thread.start()

    def wake(self) -> None:
        """Look for new checkpoints; call this after each save."""
        with self._wake:
            self._is_woken = True
            self._wake.notify_all()

    def retire(self, step: int) -> None:
        """Make the copies after a step unusable, because the run continues from that step."""
        with self._wake:
            pending = self._retire_after
            self._retire_after = step if pending is None else min(step, pending)
        self.wake()

    def get_current(self) -> Collection[int]:
        """Return the step that is being copied, if any, so that pruning can spare it."""
        current = self._current
        return () if current is None else (current,)

    def hurry(self, seconds: float) -> None:
        """Retry at once and without long pauses, because the run ends within `seconds`."""
        self._is_ending = True
        self._failures = 0
        self._retry_at = 0.0
        self.wake()
        if not self.wait(1.0):
            log.info(
                f"waiting up to {units.duration(seconds)} until the newest checkpoint is copied to "
                f"{self.where}"
            )

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to copy; return False if `seconds` have passed before."""
        with self._wake:
            return self._wake.wait_for(lambda: self._is_idle and not self._is_woken, seconds)

    def has_given_up(self) -> bool:
        """Return whether the attempts at the end of the run have failed."""
        return self._is_ending and self._failures >= _ATTEMPTS_AT_END

    def close(self) -> None:
        """Stop copying at once, and warn if the newest checkpoint is not copied."""
        is_done = self.wait(0.0)
        self._is_closed = True
        self.wake()
        if is_done and self._worker:
            self._thread.join()
            with suppress(StageError, OSError):
                self._call_place("release")
        if worker := self._worker:
            worker.close()
        if is_done and self._copies:
            log.info(
                f"the checkpoints are copied to {self.where}, up to step {max(self._copies):,}"
            )
        elif not is_done:
            newest = f"up to step {max(self._copies):,}" if self._copies else "none so far"
            log.warn(
                f"the newest checkpoint is NOT COPIED to {self.where} ({newest}): "
                f"{self._error or 'there was no time left'}. The next launch copies it; if the run "
                "is complete, the same command copies it and trains nothing"
            )

    def _copy_until_closed(self) -> None:
        while not self._is_closed:
            pause = self._copy_next()
            with self._wake:
                self._is_idle = pause is None
                self._wake.notify_all()
                if not self._is_woken and not self._is_closed:
                    self._wake.wait(pause)
                self._is_woken = False
                self._is_idle = False

    def _copy_next(self) -> float | None:
        """Copy one checkpoint; return the seconds until the next call, None if all are copied."""
        remaining = self._retry_at - time.monotonic()
        if remaining > 0:
            return remaining
        try:
            if self._worker is None:
                self._open_place()
            self._retire_abandoned()
            if (checkpoint := self._choose_checkpoint()) is None:
                return None
            self._copy_checkpoint(checkpoint)
        except Exception as error:  # a failed copy must not end the run
            if not self._is_closed:
                self._handle_failure(error)
        return 0.0

    def _open_place(self) -> None:
        """Start the child process, which opens the place and lists its copies."""
        self._worker = Worker(
            "copies of checkpoints",
            _prepare_place,
            self._target,
            self._experiment.root.name,
            self._run,
            liveness.process_record(os.getpid()),
        )
        self._copies, leftovers = self._call_place("open")
        self._show(copied=max(self._copies, default=None), copy_error=self._error)
        if leftovers:
            self._note(Event.CLEAN, 0, paths=leftovers, where=self.where)

    def _call_place(self, method: str, *arguments: Any) -> Any:
        assert self._worker is not None, "call `_open_place` first"
        self._worker.send((method, *arguments))
        return self._worker.receive()

    def _retire_abandoned(self) -> None:
        """Retire the copies of steps after the one from which the run continues."""
        with self._wake:
            after = self._retire_after
        if after is None:
            return
        if newer := [step for step in self._copies if step > after]:
            self._call_place("retire", newer)
            log.warn(
                f"the copies of {units.counted(len(newer), 'checkpoint')} after step {after:,} in "
                f"{self.where} are no longer used: the run continues from an earlier step"
            )
        with self._wake:
            self._copies = {step: c for step, c in self._copies.items() if step <= after}
            if self._retire_after == after:
                self._retire_after = None

    def _choose_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to copy next, and spare it from pruning; None if all are copied."""
        checkpoints = {
            checkpoint.step: checkpoint
            for checkpoint in commit.list_checkpoints(self._experiment.checkpoints)
            if not checkpoint.problems()
        }
        commits = {step: checkpoint.commit() for step, checkpoint in checkpoints.items()}
        missing = [
            step
            for step in commit.select_kept(commits, 1)
            if self._copies.get(step, {}).get("digest") != commits[step]["digest"]
        ]
        self._current = max(missing, default=None)
        return None if self._current is None else checkpoints[self._current]

    def _copy_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint."""
        began = time.monotonic()
        try:
            content = checkpoint.commit()
            copied = self._copies.get(checkpoint.step, {})
            # An evaluation that ends after the copy changes COMMIT alone.
            is_copied = copied.get("manifest") == content["manifest"]
            self._call_place("copy_commit" if is_copied else "copy", checkpoint)
            self._call_place("copy_run_files", self._experiment)
        except Exception:
            if checkpoint.path.exists():
                raise
            log.info(f"{checkpoint.path.name} was deleted before its copy was complete")
            return
        finally:
            self._current = None
        seconds = time.monotonic() - began
        self._copies[checkpoint.step] = content
        self._failures = 0
        self._error = ""
        self._note(
            Event.COPY,
            checkpoint.step,
            path=f"{self.where}/checkpoints/{paths.step_name(checkpoint.step)}",
            seconds=round(seconds, 3),
        )
        log.to_file(
            f"step {checkpoint.step:,}: copied to {self.where} in {units.duration(seconds)}"
        )
        self._show(copied=max(self._copies), copy_error="")
        self._prune_checkpoints(checkpoint.step)

    def _handle_failure(self, error: Exception) -> None:
        """Record a failure, and end the child process; a new one reads the credentials again."""
        self._failures += 1
        longest = _LONGEST_PAUSE_AT_END_S if self._is_ending else _LONGEST_PAUSE_S
        pause = backoff(self._failures, _FIRST_PAUSE_S, longest)
        self._retry_at = time.monotonic() + pause
        known = (from_os_error(error) if isinstance(error, OSError) else error) or error
        self._error = known.problem if isinstance(known, StageError) else str(known)
        if self._worker:
            self._worker.close()
            self._worker = None
        log.warn(
            f"checkpoints cannot be copied to {self.where}: {self._error}. Training continues; the "
            f"next attempt is in {units.duration(pause)}"
        )
        self._note(Event.COPY_FAILED, max(self._copies, default=0), reason=self._error)
        self._show(copied=max(self._copies, default=None), copy_error=self._error)


def _prepare_place(
    target: str, experiment: str, run: str, trainer: dict[str, Any]
) -> Callable[[tuple[Any, ...]], Any]:
    """Return the function of the child process that calls a method of the place, or releases it.

    The child holds the place for its parent, `trainer`, which may have ended by now.
    """
    os.nice(19)
    place = copies.CopyPlace(target, experiment, run)
    place.claim()
    lease = PlaceLease(place, trainer)

    def call(task: tuple[Any, ...]) -> Any:
        if task == ("release",):
            return lease.release()
        lease.require_held()
        return getattr(place, task[0])(*task[1:])

    return call
