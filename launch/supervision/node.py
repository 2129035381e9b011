"""Supervise the run on one node: the part that all nodes share, and the part of the followers.

The launchers work in rounds. Node 0, the head, begins a round of torchrun when every node is ready.
A node is ready once no process of its previous round is left, so processes of two rounds never
meet. A round ends on all nodes once it has ended on one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from launch.supervision.attempt import Attempt, NodeCommand
from launch.supervision.board import HEAD, NoteBoard
from launch.supervision.outcome import EXIT_INTERRUPTED, NodeOutcome, signal_code
from lib.core import units
from lib.core.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, UsageError, escape_controls
from lib.core.retry import poll

ANNOUNCE_AFTER_S = 10.0
OTHERS_LEAVE_TIMEOUT_S = 30.0
_TICK_S = 1.0
_TICK_ALONE_S = 0.2
_LOOKS = 4
# The phases of the head, and of the other nodes.
_TRAINING = ("run", "running")
_ENDING = ("end", "ended")


class NodeLauncher(ABC):
    """The launcher of one node.

    patience: seconds to wait for a missing node. stop: name of the first signal that was received.
    gave_up: whether the ranks were killed without a save.
    """

    def __init__(self, command: NodeCommand, board: NoteBoard, patience: float) -> None:
        self.command = command
        self.board = board
        self.patience = patience
        self.round = 0
        self.stop = ""
        self.gave_up = False
        self._interrupts = 0
        self._has_announced_stop = False
        self.notes: dict[int, dict[str, Any]] = {}
        self.attempt: Attempt | None = None

    @abstractmethod
    def run(self) -> int:
        """Supervise the command of this node and return the run's exit code."""

    def note_signal(self, name: str) -> None:
        """Record a signal for the next `turn`: the first one stops the run.

        Schedulers send several kinds of signals for one stop, so only a second SIGINT makes the
        launcher kill the ranks without saving.
        """
        if name == "SIGINT":
            self._interrupts += 1
        self.stop = self.stop or name

    def announce(self, text: str) -> None:
        speaker = (
            "launcher" if self.board.directory is None else f"launcher (node {self.board.node})"
        )
        print(escape_controls(f"{speaker}: {text}"), flush=True)

    def turn(self, others: range, phase: str, **facts: Any) -> None:
        """Wait a moment, read the other nodes' notes, act on signals and post this node's note."""
        time.sleep(_TICK_ALONE_S if self.board.directory is None else _TICK_S)
        self.board.look()
        self.notes = {node: self.board.read(node) for node in others}
        if phase in (*_TRAINING, *_ENDING):
            self._act_on_signals(phase)
        self.post(phase, **facts)

    def give_up(self, why: str) -> None:
        """Kill the ranks of this node; the other nodes see it in the note and kill theirs."""
        if not self.gave_up:
            self.gave_up = True
            self.announce(
                f"{why}: the ranks are killed without a save; all training "
                f"{self.since_save()} is lost"
            )
        if self.attempt:
            self.attempt.abandon(0)

    def since_save(self) -> str:
        """Return "since …" for messages, with the checkpoint from which a restart continues."""
        return "since the newest checkpoint"

    def _act_on_signals(self, phase: str) -> None:
        if self.stop and phase in _TRAINING and not self._has_announced_stop:
            self._has_announced_stop = True
            self.announce(
                f"stopped by {self.stop}: the ranks save and end within "
                f"{units.duration(self.command.save_seconds)}; a second SIGINT would kill "
                f"them, and all training {self.since_save()} would be lost"
            )
        if self._interrupts > 1:
            self.give_up("a second SIGINT")
        for node, note in self.notes.items():
            if note.get("gave_up") and self.board.is_alive(node):
                self.give_up(f"node {node} received a second SIGINT")

    def require_alone(self) -> None:
        """Raise UsageError if another launcher writes the notes of this node."""
        first_note = self.board.read(self.board.node)

        def has_changed() -> bool:
            note = self.board.read(self.board.node)
            return bool(note) and note != first_note

        if bool(first_note) and poll(has_changed, _TICK_S, _LOOKS * _TICK_S):
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
    """The launcher of any node but the head: follows the head and reports to it."""

    def __init__(self, command: NodeCommand, board: NoteBoard, patience: float) -> None:
        super().__init__(command, board, patience)
        self._last: NodeOutcome | None = None
        self._trained = ("", 0)  # head and number of the last round

    def run(self) -> int:
        """Supervise the command of this node and return the exit code that the head posts."""
        self.require_alone()
        known_heads: set[str] = set()  # heads that were active since this launcher began
        alone_since = time.monotonic()
        is_announced = False
        while True:
            self.turn(range(1), "ready")
            head = self.notes[HEAD]
            if head.get("phase") == "leave":
                if head["me"] in known_heads:
                    return self._leave(head["code"], "as node 0 reports")
            elif head:
                known_heads.add(head["me"])
            if self.board.is_alive(HEAD):
                if (
                    head.get("phase") == "run"
                    and (head["me"], head["round"]) != self._trained
                    and head["members"].get(str(self.board.node)) == self.board.me
                ):
                    self._train(head)
                alone_since = time.monotonic()
            seconds_alone = time.monotonic() - alone_since
            if (self.stop and not self.board.is_alive(HEAD)) or seconds_alone > (
                OTHERS_LEAVE_TIMEOUT_S if self._is_over() else self.patience
            ):
                return self._leave(self._code_without_head(), "node 0 is gone")
            if seconds_alone > ANNOUNCE_AFTER_S and not is_announced:
                is_announced = True
                self.announce(
                    "waiting for node 0: run the same command there, with a --save-dir that all "
                    f"nodes share ({self.board.directory})"
                )

    def _train(self, head: dict[str, Any]) -> None:
        """Take part in a round, then report its outcome here until the head continues."""
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
        """Return whether the head is silent, has been replaced, or is in another round."""
        head = self.notes[HEAD]
        return self.board.is_silent(HEAD) or (
            bool(head) and (head["me"], head["round"]) != (me, self.round)
        )

    def _leave(self, code: int, why: str) -> int:
        self.announce(f"exit code {code}, {why}")
        self.board.delete_notes()
        return code

    def _is_over(self) -> bool:
        """Return whether the run is done, so that a missing head need not come back."""
        return self._last is not None and self._last.code == EXIT_DONE

    def _code_without_head(self) -> int:
        if self.gave_up:
            return EXIT_INTERRUPTED
        failures = self._last.failures if self._last else []
        if self.stop:
            has_saved = any(failure.code == EXIT_PREEMPTED for failure in failures)
            return EXIT_PREEMPTED if has_saved else signal_code(self.stop)
        if self._is_over():
            return EXIT_DONE
        return min(failures, key=lambda f: f.time).code if failures else EXIT_BUG
