"""Supervise the run on node 0: begin rounds (see node.py), judge them, and end all launchers."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from launch.supervision import outcome
from launch.supervision.attempt import Attempt, NodeCommand
from launch.supervision.board import HEAD, NoteBoard
from launch.supervision.end_command import EndCommand
from launch.supervision.node import ANNOUNCE_AFTER_S, OTHERS_LEAVE_TIMEOUT_S, NodeLauncher
from launch.supervision.outcome import History, NodeOutcome, Verdict
from lib.core import paths, units
from lib.core.errors import EXIT_BUG, EXIT_DONE
from lib.core.paths import Experiment
from lib.core.retry import backoff
from lib.runs import run_records
from lib.runs.figures import Status

_OTHERS_END_TIMEOUT_S = 60.0  # more than they take to end by themselves and to be killed
_MAX_BACKOFF_S = 300.0


class Head(NodeLauncher):
    """The launcher of node 0.

    backoff: seconds before the first restart; doubled each time. end_command: runs when the launch
    is over.
    """

    def __init__(
        self,
        command: NodeCommand,
        board: NoteBoard,
        patience: float,
        nodes: int,
        experiment: Experiment,
        max_restarts: int,
        backoff: float,
        end_command: EndCommand,
    ) -> None:
        super().__init__(command, board, patience)
        self._others = range(1, nodes)
        self._experiment = experiment
        self._backoff = backoff
        self._end_command = end_command
        self._is_held = False  # by another launch, whose run this one must not end
        self._history = History(max_restarts, newest=self._newest())
        self._digest_before = self._config_digest()
        self._not_before = 0.0
        self._state_before: dict[str, Any] = {}
        # An earlier head may have died while the other nodes wait for this one.
        self._earlier_note = board.read(HEAD)
        self.round = self._earlier_note.get("round", 0)
        self._round_facts = {
            key: self._earlier_note[key]
            for key in ("members", "found")
            if key in self._earlier_note
        }

    def run(self) -> int:
        """Supervise the run and return its exit code.

        Raises UsageError if another launcher acts as this node.
        """
        self.require_alone()
        while True:
            if (verdict := self._wait_for_nodes()) is None:
                verdict = self._train()
            if verdict.code is not None:
                return self._leave(verdict.code, verdict.why)
            seconds = backoff(self._history.restarts, self._backoff, _MAX_BACKOFF_S)
            self._not_before = time.monotonic() + seconds
            self.announce(
                f"{verdict.why}; restart {self._history.restarts} of "
                f"{self._history.max_restarts} in {units.duration(seconds)}"
            )

    def _wait_for_nodes(self) -> Verdict | None:
        """Wait until all nodes are ready; return a verdict if the run ends instead."""
        self.round += 1
        began = time.monotonic()
        is_announced = False
        while True:
            self.turn(self._others, "gather", **self._round_facts)
            self._read_stop()
            waited = time.monotonic() - began
            missing = [
                node
                for node in self._others
                if not self.board.is_alive(node) or self.notes[node].get("phase") != "ready"
            ]
            if self.stop:
                return outcome.judge_stop(self.stop, [], False, self._newest())
            if not missing and time.monotonic() >= self._not_before:
                return None
            if missing and waited > self.patience:
                return Verdict(
                    EXIT_BUG, f"nodes {missing} did not come within {units.duration(self.patience)}"
                )
            if missing and waited > ANNOUNCE_AFTER_S and not is_announced:
                is_announced = True
                self.announce(
                    f"waiting for nodes {missing}: run the same command there, each with its own "
                    f"--node-rank and with a --save-dir that all share ({self.board.directory})"
                )

    def _read_stop(self) -> None:
        for node, note in self.notes.items():
            if note.get("stop") and self.board.is_alive(node):
                self.stop = self.stop or note["stop"]

    def _train(self) -> Verdict:
        members = {str(node): note["me"] for node, note in self.notes.items()}
        earlier_members = self._earlier_note.get("members", {})
        if any(earlier_members.get(node) == me for node, me in members.items()):
            self._digest_before = self._earlier_note["found"]
        has_begun = self._config_digest() != self._digest_before
        self._state_before = self._state()
        self._round_facts = {"members": members, "found": self._digest_before}
        self.post("run", **self._round_facts, has_begun=has_begun)
        self.attempt = attempt = Attempt(self.command, HEAD)
        while not attempt.tick():
            self.turn(self._others, "run", **self._round_facts, has_begun=has_begun)
            self._read_stop()
            if self.stop:
                attempt.stop(self.stop)
            outcomes_so_far = [
                node_outcome for n in self._others if (node_outcome := self._outcome(n))
            ]
            if any(self._is_lost(n, members) for n in self._others) or self._is_over(
                outcomes_so_far
            ):
                attempt.abandon()
        outcomes, lost = self._wait_for_others([attempt.outcome()], members)
        self._is_held = any(f.is_held() for node in outcomes for f in node.failures)
        self._history.note_newest(self._newest())
        state = self._new_state()
        if self.gave_up and (verdict := outcome.judge_given_up(outcomes, state, self.since_save())):
            return verdict
        return outcome.judge_round(
            outcomes, lost, state, self.stop, has_begun, self._history, self.since_save()
        )

    def since_save(self) -> str:
        newest = self._newest()
        return f"since the checkpoint of step {newest:,}" if newest >= 0 else "so far"

    def _is_lost(self, node: int, members: dict[str, str]) -> bool:
        """Return whether a node of this round is silent, or has come back as a new launcher."""
        note = self.notes[node]
        return self.board.is_silent(node) or (bool(note) and note["me"] != members[str(node)])

    def _outcome(self, node: int) -> NodeOutcome | None:
        note = self.notes[node]
        is_ended = note.get("round") == self.round and note.get("phase") == "ended"
        return NodeOutcome.from_note(note["outcome"]) if is_ended else None

    def _is_over(self, outcomes: list[NodeOutcome]) -> bool:
        """Return whether the round is over: a node has failed, or training is complete.

        A node that ends without an error does not end the round, since with --prepare-only some
        nodes are done long before others.
        """
        return any(node.code != EXIT_DONE for node in outcomes) or bool(
            outcomes and self._new_state().get("status") == Status.COMPLETE
        )

    def _wait_for_others(
        self, outcomes: list[NodeOutcome], members: dict[str, str]
    ) -> tuple[list[NodeOutcome], list[int]]:
        """Wait for the other nodes; return the outcomes of all nodes, and the lost nodes."""
        deadline = float("inf")
        lost = []
        waiting = set(self._others)
        while waiting:
            is_over = self._is_over(outcomes)
            if is_over and deadline == float("inf"):
                deadline = time.monotonic() + _OTHERS_END_TIMEOUT_S
            self.turn(self._others, "end", **self._round_facts, is_over=is_over)
            self._read_stop()
            for node in sorted(waiting):
                if node_outcome := self._outcome(node):
                    outcomes.append(node_outcome)
                elif self._is_lost(node, members) or time.monotonic() > deadline:
                    lost.append(node)
                else:
                    continue
                waiting.remove(node)
        return outcomes, lost

    def _leave(self, code: int, why: str) -> int:
        """Run the command of --on-end, then post the exit code and wait until all have read it."""
        self.announce(f"exit code {code}: {why}")
        if not self._is_held:
            self._end_command.start(code, why, self.announce)
        while self._end_command.is_running():  # Slurm kills this node soon after others have left
            self.turn(self._others, "finish", **self._round_facts)
        deadline = time.monotonic() + OTHERS_LEAVE_TIMEOUT_S
        self.post("leave", code=code)
        while (
            any(note and self.board.is_alive(node) for node, note in self.notes.items())
            and time.monotonic() < deadline
        ):
            self.turn(self._others, "leave", code=code)
        self.board.delete_notes(everyone=True)
        return code

    def _newest(self) -> int:
        """Return the highest step in the names of the checkpoints, -1 if there is none."""
        steps = [paths.step_of(path.name) for path in self._experiment.checkpoints.glob("step_*")]
        return max((step for step in steps if step is not None), default=-1)

    def _config_digest(self) -> str:
        """Return the digest of config.yaml, which stage 04 writes whenever training begins."""
        try:
            return hashlib.sha256(self._experiment.config.read_bytes()).hexdigest()
        except OSError:
            return ""

    def _state(self) -> dict[str, Any]:
        return run_records.read_state(self._experiment.state)

    def _new_state(self) -> dict[str, Any]:
        """Return the content of state.json if this round has written it, otherwise {}."""
        state = self._state()
        return state if state != self._state_before else {}
