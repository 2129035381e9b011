"""Any node but the head: does what the head says, and reports."""

from __future__ import annotations

import time
from typing import Any

from launch.supervision.attempt import Attempt, Plan
from launch.supervision.board import HEAD, Board
from launch.supervision.node import OTHERS_LEAVE_WITHIN_S, TELL_AFTER_S, Node
from launch.supervision.outcome import NodeOutcome
from lib.core.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED


class Follower(Node):
    """The launcher of any other node."""

    def __init__(self, plan: Plan, board: Board, patience: float) -> None:
        super().__init__(plan, board, patience)
        self._last: NodeOutcome | None = None
        self._trained = ("", 0)  # head and number of the last round

    def run(self) -> int:
        """Return the exit code that the head tells."""
        self.require_alone()
        known: set[str] = set()  # heads that were at work since this launcher began
        alone_since, told = time.monotonic(), False
        while True:
            self.turn(range(1), "ready")
            head = self.notes[HEAD]
            if head.get("phase") == "leave":
                if head["me"] in known:
                    return self._leave(head["code"], "as node 0 says")
            elif head:
                known.add(head["me"])
            if self.board.is_alive(HEAD):
                if head.get("phase") == "run" and (head["me"], head["round"]) != self._trained \
                        and head["members"].get(str(self.board.node)) == self.board.me:
                    self._train(head)
                alone_since = time.monotonic()
            alone = time.monotonic() - alone_since
            if (self.stop and not self.board.is_alive(HEAD)) or \
                    alone > (OTHERS_LEAVE_WITHIN_S if self._is_over() else self.patience):
                return self._leave(self._code_without_head(), "node 0 is not there any more")
            if alone > TELL_AFTER_S and not told:
                told = True
                self.say("waiting for node 0: the same command there, with a --save-dir that all "
                         f"nodes share ({self.board.directory})")

    def _train(self, head: dict[str, Any]) -> None:
        """Take part in a round, and report how it ended here until the head goes on."""
        me, self.round = self._trained = head["me"], head["round"]
        self.attempt = attempt = Attempt(self.plan, self.board.node)
        while not attempt.tick():
            self.turn(range(1), "running")
            head = self.notes[HEAD]
            self.stop = self.stop or head.get("stop", "")
            if self.stop:
                attempt.stop(self.stop)
            if self._head_moved(me) or head.get("is_over") or head.get("phase") == "leave":
                attempt.abandon()
        self._last = attempt.outcome()
        while not self._head_moved(me) and self.notes[HEAD].get("phase") != "leave":
            self.turn(range(1), "ended", outcome=self._last.note())

    def _head_moved(self, me: str) -> bool:
        """Tell whether the head is gone, is back as another launcher, or in a later round."""
        head = self.notes[HEAD]
        return self.board.is_silent(HEAD) or \
            (bool(head) and (head["me"], head["round"]) != (me, self.round))

    def _leave(self, code: int, why: str) -> int:
        self.say(f"exit code {code}, {why}")
        self.board.forget()
        return code

    def _is_over(self) -> bool:
        """Tell whether a head that is gone need not come back."""
        return self._last is not None and self._last.code == EXIT_DONE

    def _code_without_head(self) -> int:
        if self.stop:
            return EXIT_PREEMPTED
        if self._is_over():
            return EXIT_DONE
        failures = self._last.failures if self._last else []
        return min(failures, key=lambda f: f.time).code if failures else EXIT_BUG
