"""Keep checkpoints in the directory of the run, and copy each one to a second place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.copier import Copier
from lib.checkpoints.place import SavedRun
from lib.checkpoints.run_directory import RunDirectory
from lib.parallel.layout import on_rank_0


class CopiedDirectory(RunDirectory):
    """The checkpoints that a run relies on, which a thread of rank 0 copies."""

    def __init__(
        self,
        run: SavedRun,
        checkpoints: Path,
        every: int,
        keep: int,
        copier: Copier | None,
    ) -> None:
        """copier: None on all ranks except rank 0. See `RunDirectory` for the rest."""
        super().__init__(run, checkpoints, every, keep)
        self._copier = copier

    def finish_save(self, step: int) -> None:
        """Delete checkpoints that retention drops, and copy the new one."""
        super().finish_save(step)
        self._wake()

    def record_evaluation(self, step: int, facts: Mapping[str, Any]) -> Checkpoint | None:
        """Write the figures into COMMIT of a checkpoint that waits for them, and copy it."""
        if checkpoint := super().record_evaluation(step, facts):
            self._wake()
        return checkpoint

    def drop_newer(self, step: int, why: str) -> None:
        """Move the checkpoints after a step to quarantine, and make their copies unusable."""
        super().drop_newer(step, why)
        if self._copier:
            self._copier.retire(step)

    def start(self, step: int) -> None:
        """Begin to copy; the run continues after a step."""
        if self._copier:
            self._copier.start(step, self.prune)

    def stop(
        self, patience: float, is_stopped: Callable[[], bool], beat: Callable[[], None]
    ) -> None:
        """Wait at most `patience` seconds for the copy of the newest checkpoint, then stop copying.

        No rank waits longer in a collective than rank 0 needs for its answer.
        """
        deadline = time.monotonic() + patience

        def is_over() -> bool:
            assert self._copier is not None, "rank 0 has a copier"
            if self._copier.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                return True
            return time.monotonic() > deadline or self._copier.has_given_up()

        if self._copier:
            self._copier.hurry(patience)
        while not (on_rank_0(is_over, self.run.layout.control) or is_stopped()):
            beat()
        if self._copier:
            self._copier.close()

    def _list_spared(self) -> Collection[int]:
        """Return the step of the checkpoint that is being copied, if any."""
        return self._copier.get_current() if self._copier else ()

    def _wake(self) -> None:
        if self._copier:
            self._copier.wake()
