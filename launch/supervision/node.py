"""What the launchers of all nodes share.

They work in rounds of torchrun, which node 0, the head, begins and judges. A round begins when
every node is ready: whatever was left of the round before is gone by then, so no process of one
round meets one of another. It ends everywhere once it has ended anywhere.
"""

from __future__ import annotations

import time
from typing import Any

from launch.supervision.attempt import Attempt, Plan
from launch.supervision.board import Board
from lib.core.errors import UsageError

TELL_AFTER_S = 10.0
OTHERS_LEAVE_WITHIN_S = 30.0
_TICK_S, _TICK_ALONE_S = 1.0, 0.2
_LOOKS = 4


class Node:
    """The launcher of a node. stop: name of the signal that it got.

    patience: seconds to wait for a node that is not there.
    """

    def __init__(self, plan: Plan, board: Board, patience: float) -> None:
        self.plan, self.board, self.patience = plan, board, patience
        self.round, self.stop = 0, ""
        self.notes: dict[int, dict[str, Any]] = {}
        self.attempt: Attempt | None = None

    def signalled(self, name: str) -> None:
        """Note a signal; the first one stops the run, a second Ctrl-C does not wait for its save.
        """
        if self.stop and name == "SIGINT" and self.attempt:
            self.attempt.abandon(0)
        self.stop = self.stop or name

    def say(self, text: str) -> None:
        who = "launcher" if self.board.directory is None else f"launcher (node {self.board.node})"
        print(f"{who}: {text}", flush=True)

    def turn(self, others: range, phase: str, **facts: Any) -> None:
        """Wait a moment, read the notes of others and write one's own."""
        time.sleep(_TICK_ALONE_S if self.board.directory is None else _TICK_S)
        self.board.look()
        self.notes = {node: self.board.read(node) for node in others}
        self.post(phase, **facts)

    def require_alone(self) -> None:
        """Raise UsageError when another launcher writes the notes of this node."""
        first = self.board.read(self.board.node)
        for _ in range(_LOOKS if first else 0):
            time.sleep(_TICK_S)
            if (now := self.board.read(self.board.node)) and now != first:
                raise UsageError(f"another launcher is at work as node {self.board.node} of this "
                                 "experiment", expected="another --node-rank on each machine, and "
                                                        "one launch of an experiment at a time")

    def post(self, phase: str, **facts: Any) -> None:
        self.board.post(phase=phase, round=self.round, stop=self.stop, **facts)
