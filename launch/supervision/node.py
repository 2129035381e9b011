"""Launches on a node: what all nodes share, and what any of them but the head does.

They work in rounds of torchrun, which node 0, the head, begins and judges. A round begins when
every node is ready: whatever was left of the round before is gone by then, so no process of one
round meets one of another. It ends everywhere once it has ended anywhere.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from launch.supervision.attempt import Attempt, NodeCommand
from launch.supervision.board import HEAD, NoteBoard
from launch.supervision.outcome import EXIT_INTERRUPTED, NodeOutcome
from lib.core import units
from lib.core.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, UsageError, visible
from lib.core.retry import poll

TELL_AFTER_S = 10.0
OTHERS_LEAVE_WITHIN_S = 30.0
_TICK_S = 1.0
_TICK_ALONE_S = 0.2
_LOOKS = 4
# Phases: of the head, and of the other nodes.
_TRAINING = ("run", "running")
_ENDING = ("end", "ended")


class NodeLauncher(ABC):
    """Launches on a node. stop: name of the signal that it got. gave_up: whether the ranks are
    killed without a save.

    patience: seconds to wait for a node that is not there.
    """

    def __init__(self, command: NodeCommand, board: NoteBoard, patience: float) -> None:
        self.command = command
        self.board = board
        self.patience = patience
        self.round = 0
        self.stop = ""
        self.gave_up = False
        self._interrupts = 0
        self._has_told_stop = False
        self.notes: dict[int, dict[str, Any]] = {}
        self.attempt: Attempt | None = None

    @abstractmethod
    def run(self) -> int:
        """Keep the command of this node running; return the run's exit code."""

    def signalled(self, name: str) -> None:
        """Note a signal; the first one stops the run, and only a second SIGINT gives up its save.

        Schedulers send several kinds of signals for one stop. `turn` acts on what is noted here.
        """
        if name == "SIGINT":
            self._interrupts += 1
        self.stop = self.stop or name

    def say(self, text: str) -> None:
        who = "launcher" if self.board.directory is None else f"launcher (node {self.board.node})"
        print(visible(f"{who}: {text}"), flush=True)

    def turn(self, others: range, phase: str, **facts: Any) -> None:
        """Wait a moment, read the notes of others and write one's own."""
        time.sleep(_TICK_ALONE_S if self.board.directory is None else _TICK_S)
        self.board.look()
        self.notes = {node: self.board.read(node) for node in others}
        if phase in (*_TRAINING, *_ENDING):
            self._heed_signals(phase)
        self.post(phase, **facts)

    def give_up(self, why: str) -> None:
        """Kill the ranks of this node; the other nodes read the note and kill theirs."""
        if not self.gave_up:
            self.gave_up = True
            self.say(
                f"{why}: the ranks are killed without a save, and what was trained "
                f"{self.since_save()} is lost"
            )
        if self.attempt:
            self.attempt.abandon(0)

    def since_save(self) -> str:
        """Return the checkpoint from which a restart trains again."""
        return "since the newest checkpoint"

    def _heed_signals(self, phase: str) -> None:
        if self.stop and phase in _TRAINING and not self._has_told_stop:
            self._has_told_stop = True
            self.say(
                f"stopped by {self.stop}: the ranks save and end, within "
                f"{units.duration(self.command.save_seconds)}; a second SIGINT would kill "
                f"them, and lose what was trained {self.since_save()}"
            )
        if self._interrupts > 1:
            self.give_up("a second SIGINT")
        for node, note in self.notes.items():
            if note.get("gave_up") and self.board.is_alive(node):
                self.give_up(f"node {node} gives up")

    def require_alone(self) -> None:
        """Raise UsageError when another launcher writes the notes of this node."""
        first = self.board.read(self.board.node)

        def has_changed() -> bool:
            now = self.board.read(self.board.node)
            return bool(now) and now != first

        if bool(first) and poll(has_changed, _TICK_S, _LOOKS * _TICK_S):
            raise UsageError(
                f"another launcher is at work as node {self.board.node} of this experiment",
                expected="another --node-rank on each machine, and "
                "one launch of an experiment at a time",
            )

    def post(self, phase: str, **facts: Any) -> None:
        self.board.post(
            phase=phase, round=self.round, stop=self.stop, gave_up=self.gave_up, **facts
        )


class Follower(NodeLauncher):
    """Launches on any node but the head: does what the head says, and reports."""

    def __init__(self, command: NodeCommand, board: NoteBoard, patience: float) -> None:
        super().__init__(command, board, patience)
        self._last: NodeOutcome | None = None
        self._trained = ("", 0)  # head and number of the last round

    def run(self) -> int:
        """Return the exit code that the head tells."""
        self.require_alone()
        known: set[str] = set()  # heads that were at work since this launcher began
        alone_since = time.monotonic()
        is_announced = False
        while True:
            self.turn(range(1), "ready")
            head = self.notes[HEAD]
            if head.get("phase") == "leave":
                if head["me"] in known:
                    return self._leave(head["code"], "as node 0 says")
            elif head:
                known.add(head["me"])
            if self.board.is_alive(HEAD):
                if (
                    head.get("phase") == "run"
                    and (head["me"], head["round"]) != self._trained
                    and head["members"].get(str(self.board.node)) == self.board.me
                ):
                    self._train(head)
                alone_since = time.monotonic()
            alone = time.monotonic() - alone_since
            if (self.stop and not self.board.is_alive(HEAD)) or alone > (
                OTHERS_LEAVE_WITHIN_S if self._is_over() else self.patience
            ):
                return self._leave(self._code_without_head(), "node 0 is not there any more")
            if alone > TELL_AFTER_S and not is_announced:
                is_announced = True
                self.say(
                    "waiting for node 0: the same command there, with a --save-dir that all "
                    f"nodes share ({self.board.directory})"
                )

    def _train(self, head: dict[str, Any]) -> None:
        """Take part in a round, and report how it ended here until the head goes on."""
        me = head["me"]
        self.round = head["round"]
        self._trained = (me, self.round)
        self.attempt = attempt = Attempt(self.command, self.board.node)
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
        return self.board.is_silent(HEAD) or (
            bool(head) and (head["me"], head["round"]) != (me, self.round)
        )

    def _leave(self, code: int, why: str) -> int:
        self.say(f"exit code {code}, {why}")
        self.board.take_down()
        return code

    def _is_over(self) -> bool:
        """Tell whether a head that is gone need not come back."""
        return self._last is not None and self._last.code == EXIT_DONE

    def _code_without_head(self) -> int:
        if self.gave_up:
            return EXIT_INTERRUPTED
        if self.stop:
            return EXIT_PREEMPTED
        if self._is_over():
            return EXIT_DONE
        failures = self._last.failures if self._last else []
        return min(failures, key=lambda f: f.time).code if failures else EXIT_BUG
