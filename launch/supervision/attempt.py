"""torchrun on this node, once: started, watched, stopped, and nothing of it left."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launch.supervision import outcome
from launch.supervision.outcome import NodeOutcome
from launch.supervision.processes import Command, kills_for_memory

_ENDS_BY_ITSELF_S = 20.0  # once a rank, or another node's part, has ended
_LEFT_OVER_S = 5.0  # for what outlives torchrun
_AFTER_THE_SAVE_S = 30.0
_MEMORY_WINDOW_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What to run on this node. environment: to set beside what is there.

    save_seconds: how long a save may take.
    """

    command: list[str]
    environment: dict[str, str]
    save_seconds: float


class Attempt:
    """Call `tick` until it returns True, then ask for the outcome."""

    def __init__(self, plan: Plan, node: int) -> None:
        self._plan, self._node = plan, node
        self._logs = tempfile.TemporaryDirectory(prefix="launch-")
        self._kills, self._killed_at = kills_for_memory(), float("-inf")
        self._deadline, self._stopping, self._ended_at = float("inf"), False, 0.0
        # torchrun has each rank write an error file below the directory; this one is its own.
        torchrun = {"PET_LOG_DIR": self._logs.name,
                    "TORCHELASTIC_ERROR_FILE": str(Path(self._logs.name) / outcome.ERROR_FILE)}
        self._command = Command(plan.command, {**plan.environment, **torchrun})

    def tick(self) -> bool:
        """Look at the processes, kill them when their time is over; True once all have ended."""
        if (kills := kills_for_memory()) > self._kills:
            self._kills, self._killed_at = kills, time.monotonic()
        if any(Path(self._logs.name).rglob(outcome.ERROR_FILE)):
            self.abandon()  # a rank that waits in a collective for the one that failed does not end
        deadline = self._deadline
        if self._command.poll() is not None:
            if not self._command.running():
                return True
            self._ended_at = self._ended_at or time.monotonic()
            if not self._stopping:  # else ranks that save may outlive a torchrun that did not
                deadline = min(deadline, self._ended_at + _LEFT_OVER_S)
        if time.monotonic() < deadline:
            return False
        if stuck := self._command.kill_all():
            print(f"launcher: processes that cannot be killed are left: {stuck}", flush=True)
        return True

    def stop(self, signal_name: str) -> None:
        """Have all ranks save and end, with time for it; nothing the second time."""
        if not self._stopping:
            self._stopping = True
            self._command.ask_to_stop(signal_name)
            self._end_within(self._plan.save_seconds + _AFTER_THE_SAVE_S)

    def abandon(self, seconds: float = _ENDS_BY_ITSELF_S) -> None:
        """Let it end by itself for a while, since another rank or node has ended or is lost."""
        self._end_within(seconds)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def outcome(self) -> NodeOutcome:
        """Return how it ended; called once."""
        failures = outcome.read_failures(Path(self._logs.name), self._node)
        self._logs.cleanup()
        return NodeOutcome(self._node, self._command.poll(), failures,
                           time.monotonic() - self._killed_at < _MEMORY_WINDOW_S)
