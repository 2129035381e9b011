"""The second tier: frequent checkpoints beside the shared ones, which are what a run relies on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.snapshot import Snapshot, random_states, set_random_states
from lib.models.sharded import local_tensor

_RANDOM = "random."  # prefix of random states among the tensors


Note = Callable[..., None]  # notes an event of the run: its name, step and facts


def unnoted(event: str, step: int, **facts: Any) -> None:
    """Note nothing."""


class Tier(ABC):
    """Checkpoints of one run, each rank's state as it is, for as many ranks as wrote them.

    where: the place, as a sentence names it. note: is told what is deleted. All ranks must call
    everything here together.
    """

    where: str
    note: Note

    def note_deleted(self, step: int, steps: list[int], why: str = "") -> None:
        """Note which checkpoints are gone, if any. step: that of the run."""
        if steps:
            self.note(
                "prune", step, steps=steps, where=self.where, **({"reason": why} if why else {})
            )

    @abstractmethod
    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Commit what all ranks captured, or raise on every rank what went wrong on any."""

    @abstractmethod
    def newest_valid(
        self,
        identity: dict[str, Any],
        after: int,
        quarantined: Callable[[int, str], None],
        before: int | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint of which every rank's part is whole, every byte of it.

        identity: as of the run now; others are left out. after: only a later step than this one.
        before: only this step or an earlier one. Of a damaged one `quarantined(step, why)` is
        called on rank 0.
        """

    @abstractmethod
    def holds(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint is one of these."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Delete them all: the run is complete, at this step."""

    @abstractmethod
    def supersede(self, step: int, why: str) -> None:
        """Put out of the way what is newer than the step that the run goes on from."""

    @abstractmethod
    def _fill(self, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
        """Fill tensors from this rank's part; ArtifactError when they are others than those."""

    def fill(
        self, checkpoint: Checkpoint, tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        """Fill tensors and random states of this rank.

        Raises ArtifactError when names, shapes or dtypes differ.
        """
        states = random_states(device)
        self._fill(checkpoint, _of_rank(tensors, states))
        set_random_states(states, device)


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return all tensors of a snapshot as this rank holds them, random states among them."""
    return _of_rank(snapshot.tensors, snapshot.random_states)


def _of_rank(tensors: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_tensor(tensor) for name, tensor in tensors.items()} | {
        _RANDOM + kind: state for kind, state in states.items()
    }
