"""Define the second tier: frequent checkpoints in addition to the shared ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.snapshot import Snapshot, get_random_states, set_random_states
from lib.core.events import Event
from lib.models.sharded import local_tensor

_RANDOM = "random."  # prefix of random states among the tensors


Note = Callable[..., None]  # records an event of the run: (name, step, **facts)


def ignore_event(event: str, step: int, **facts: Any) -> None:
    """Ignore an event."""


class Tier(ABC):
    """Frequent checkpoints of one run, which only the same number of ranks can load.

    Each rank writes its own shards. The run does not rely on this tier: it can always fall back to
    the shared checkpoints. where: the place, as messages name it. note: records deletions. All
    ranks must call every method.
    """

    where: str
    note: Note

    def note_deleted(self, step: int, steps: list[int], why: str = "") -> None:
        """Record deleted checkpoints, if any. step: the current step of the run."""
        if steps:
            reason = {"reason": why} if why else {}
            self.note(Event.PRUNE, step, steps=steps, where=self.where, **reason)

    @abstractmethod
    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Write and commit a checkpoint; if a rank fails, all ranks raise."""

    @abstractmethod
    def find_newest_valid(
        self,
        identity: dict[str, Any],
        after: int,
        on_quarantine: Callable[[int, str], None],
        before: int | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint of which every rank's files match their digests.

        identity: of the current run; checkpoints with another one are ignored. after: consider only
        later steps. before: consider only this step and earlier ones. For each damaged checkpoint,
        `on_quarantine(step, why)` is called on rank 0.
        """

    @abstractmethod
    def holds(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to this tier."""

    @abstractmethod
    def delete_all(self, step: int) -> None:
        """Delete all checkpoints of the tier, because the run is complete at this step."""

    @abstractmethod
    def drop_newer(self, step: int, why: str) -> None:
        """Make the checkpoints after a step unusable, because the run continues from that step."""

    @abstractmethod
    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        """Load tensors from this rank's part; raise ArtifactError if names or shapes differ."""

    def fill(
        self, checkpoint: Checkpoint, tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        """Load the tensors and random states of this rank.

        Raises ArtifactError if names, shapes or dtypes differ.
        """
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
