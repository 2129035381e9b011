"""Say what the checkpointer asks of a place that contains checkpoints of a run.

A run has one place that it relies on, the directory of the run (run_directory.py), whose
checkpoints may be copied elsewhere (copied_directory.py). It may have further places for more
frequent checkpoints: tier.py, and the tiers of vendors in vendor_tiers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.contents import TrainRecord
from lib.checkpoints.snapshot import Snapshot
from lib.parallel.layout import ParallelLayout
from lib.runs.events import Event

Note = Callable[..., None]  # records an event of the run: (name, step, **facts)


def ignore_event(event: str, step: int, **facts: Any) -> None:
    """Ignore an event. This is the default of `note`."""


@dataclass(frozen=True)
class SavedRun:
    """The run whose checkpoints a place contains.

    name: the experiment's name. id: the run's ID. identity: options and inputs that a resumed run
    must share with this run. note: records events.
    """

    name: str
    id: str
    identity: dict[str, Any]
    layout: ParallelLayout
    note: Note = ignore_event


class CheckpointPlace:
    """Writes, finds and loads checkpoints of one run. All ranks must call every method.

    `write` and `finish_save` run in the saving thread and communicate over the group `saving`, the
    other methods over `control`. where: the name of the place in messages. is_required: whether the
    run relies on it; otherwise a failed save is only a warning. every: steps between checkpoints.
    """

    where: str
    is_required = False

    def __init__(self, run: SavedRun, every: int) -> None:
        self.run = run
        self.every = every

    def is_due(self, step: int) -> bool:
        """Return whether the place takes a checkpoint of a step, unless an earlier one takes it."""
        return step % self.every == 0

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Write and commit a checkpoint; if a rank fails, all ranks raise."""
        raise NotImplementedError

    def finish_save(self, step: int) -> None:
        """Do what follows a save that has been recorded, such as deleting older checkpoints."""

    def find_newest(self, before: int | None = None, after: int = 0) -> Checkpoint | None:
        """Return the newest checkpoint that all ranks have verified, None if there is none.

        before: consider only this step and earlier ones. after: consider only later steps. Damaged
        checkpoints that are newer are recorded, and not considered again.
        """
        raise NotImplementedError

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether `load` can read a checkpoint."""
        raise NotImplementedError

    def load(self, checkpoint: Checkpoint, tensors: dict[str, Tensor], record: TrainRecord) -> None:
        """Load the tensors and random states of a verified checkpoint with this record.

        Raises ArtifactError if names, shapes or dtypes differ.
        """
        raise NotImplementedError

    def drop_newer(self, step: int, why: str) -> None:
        """Make the checkpoints after a step unusable, because the run continues from that step."""
        raise NotImplementedError

    def describe(self, checkpoint: Checkpoint) -> str:
        """Return the name of a checkpoint for the events of the run."""
        return str(checkpoint.path)

    def record_evaluation(self, step: int, facts: Mapping[str, Any]) -> Checkpoint | None:
        """Add the figures of an evaluation to a checkpoint that waits for them, and return it."""
        return None

    def start(self, step: int) -> None:
        """Begin what runs beside the training, which continues from a step."""

    def stop(
        self, patience: float, is_stopped: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        """End what runs beside the training; see `Checkpointer.stop`."""

    def clear(self, step: int) -> None:
        """Delete the checkpoints that are useless after the last step of a complete run."""

    def note_deleted(self, step: int, steps: list[int], why: str = "") -> None:
        """Record deleted checkpoints, if any. step: the current step of the run."""
        if steps:
            reason = {"reason": why} if why else {}
            self.run.note(Event.PRUNE, step, steps=steps, where=self.where, **reason)

    def note_damaged(self, step: int, why: str) -> None:
        """Record that the checkpoint of a step is damaged."""
        self.run.note(Event.QUARANTINE, step, reason=why)
