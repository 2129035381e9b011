"""Is the launcher of node 0: begins rounds, judges them, and tells all to leave with a code."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from launch.supervision import outcome
from launch.supervision.attempt import Attempt, NodeCommand
from launch.supervision.board import HEAD, NoteBoard
from launch.supervision.node import OTHERS_LEAVE_WITHIN_S, TELL_AFTER_S, NodeLauncher
from launch.supervision.outcome import History, NodeOutcome, Verdict
from lib.core import paths, run_records, units
from lib.core.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED
from lib.core.paths import Experiment
from lib.core.retry import backoff

_OTHERS_END_WITHIN_S = 60.0  # more than they take to end by themselves and to be killed
_LONGEST_BACKOFF_S = 300.0


class Head(NodeLauncher):
    """Launches on node 0.

    backoff: seconds before the first restart; doubled each time.
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
    ) -> None:
        super().__init__(command, board, patience)
        self._others = range(1, nodes)
        self._experiment = experiment
        self._backoff = backoff
        self._history = History(max_restarts, newest=self._newest())
        self._found = self._mark()
        self._not_before = 0.0
        self._state_before: dict[str, Any] = {}
        # What an earlier head left: it may have died while the others wait for this one.
        self._before_me = board.read(HEAD)
        self.round = self._before_me.get("round", 0)
        self._facts = {
            key: self._before_me[key] for key in ("members", "found") if key in self._before_me
        }

    def run(self) -> int:
        """Return the exit code of the run; UsageError when another launcher is at work as this."""
        self.require_alone()
        while True:
            if (verdict := self._gather()) is None:
                verdict = self._train()
            if verdict.code is not None:
                return self._leave(verdict.code, verdict.why)
            seconds = backoff(self._history.restarts, self._backoff, _LONGEST_BACKOFF_S)
            self._not_before = time.monotonic() + seconds
            self.say(
                f"{verdict.why}; restart {self._history.restarts} of "
                f"{self._history.max_restarts} in {units.duration(seconds)}"
            )

    def _gather(self) -> Verdict | None:
        """Wait until all nodes are ready; return why that will not be."""
        self.round += 1
        began = time.monotonic()
        is_announced = False
        while True:
            self.turn(self._others, "gather", **self._facts)
            self._hear_stop()
            waited = time.monotonic() - began
            missing = [
                n
                for n in self._others
                if not self.board.is_alive(n) or self.notes[n].get("phase") != "ready"
            ]
            if self.stop:
                return Verdict(EXIT_PREEMPTED, f"stopped by {self.stop}")
            if not missing and time.monotonic() >= self._not_before:
                return None
            if missing and waited > self.patience:
                return Verdict(
                    EXIT_BUG, f"nodes {missing} did not come within {units.duration(self.patience)}"
                )
            if missing and waited > TELL_AFTER_S and not is_announced:
                is_announced = True
                self.say(
                    f"waiting for nodes {missing}: the same command there, with its own "
                    f"--node-rank and a --save-dir that all share ({self.board.directory})"
                )

    def _hear_stop(self) -> None:
        for node, note in self.notes.items():
            if note.get("stop") and self.board.is_alive(node):
                self.stop = self.stop or note["stop"]

    def _train(self) -> Verdict:
        members = {str(node): note["me"] for node, note in self.notes.items()}
        earlier = self._before_me.get("members", {})
        if any(earlier.get(node) == me for node, me in members.items()):
            self._found = self._before_me["found"]
        has_begun = self._mark() != self._found
        self._state_before = self._state()
        self._facts = {"members": members, "found": self._found}
        self.post("run", **self._facts, has_begun=has_begun)
        self.attempt = attempt = Attempt(self.command, HEAD)
        while not attempt.tick():
            self.turn(self._others, "run", **self._facts, has_begun=has_begun)
            self._hear_stop()
            if self.stop:
                attempt.stop(self.stop)
            ended = [found for n in self._others if (found := self._outcome(n))]
            if any(self._is_lost(n, members) for n in self._others) or self._is_over(ended):
                attempt.abandon()
        outcomes, lost = self._others_end([attempt.outcome()], members)
        self._history.progressed(self._newest())
        state = self._new_state()
        if self.gave_up and (verdict := outcome.judge_given_up(outcomes, state, self.since_save())):
            return verdict
        return outcome.judge(outcomes, lost, state, self.stop, has_begun, self._history)

    def since_save(self) -> str:
        newest = self._newest()
        return f"since the checkpoint of step {newest:,}" if newest >= 0 else "so far"

    def _is_lost(self, node: int, members: dict[str, str]) -> bool:
        """Tell whether a node of this round is gone, or is back as another launcher."""
        note = self.notes[node]
        return self.board.is_silent(node) or (bool(note) and note["me"] != members[str(node)])

    def _outcome(self, node: int) -> NodeOutcome | None:
        note = self.notes[node]
        is_ended = note.get("round") == self.round and note.get("phase") == "ended"
        return NodeOutcome.of_note(note["outcome"]) if is_ended else None

    def _is_over(self, ended: list[NodeOutcome]) -> bool:
        """Tell whether no node should go on: one that ended failed, or training is complete.

        With --prepare-only some are done long before others.
        """
        return any(node.code != EXIT_DONE for node in ended) or bool(
            ended and self._new_state().get("status") == "complete"
        )

    def _others_end(
        self, outcomes: list[NodeOutcome], members: dict[str, str]
    ) -> tuple[list[NodeOutcome], list[int]]:
        """Return how the round ended on all nodes, and which of them are lost."""
        deadline = float("inf")
        lost = []
        waiting = set(self._others)
        while waiting:
            is_over = self._is_over(outcomes)
            if is_over and deadline == float("inf"):
                deadline = time.monotonic() + _OTHERS_END_WITHIN_S
            self.turn(self._others, "end", **self._facts, is_over=is_over)
            self._hear_stop()
            for node in sorted(waiting):
                if ended := self._outcome(node):
                    outcomes.append(ended)
                elif self._is_lost(node, members) or time.monotonic() > deadline:
                    lost.append(node)
                else:
                    continue
                waiting.remove(node)
        return outcomes, lost

    def _leave(self, code: int, why: str) -> int:
        """Tell all nodes to end with the code, and wait until they have read it."""
        self.say(f"exit code {code}: {why}")
        deadline = time.monotonic() + OTHERS_LEAVE_WITHIN_S
        self.post("leave", code=code)
        while (
            any(note and self.board.is_alive(node) for node, note in self.notes.items())
            and time.monotonic() < deadline
        ):
            self.turn(self._others, "leave", code=code)
        self.board.take_down(everyone=True)
        return code

    def _newest(self) -> int:
        """Return the step of the newest checkpoint by its name, -1 without one."""
        steps = [paths.step_of(path.name) for path in self._experiment.checkpoints.glob("step_*")]
        return max((step for step in steps if step is not None), default=-1)

    def _mark(self) -> str:
        """Return what changes whenever training begins: each launch of stage 04 has a config."""
        try:
            return hashlib.sha256(self._experiment.config.read_bytes()).hexdigest()
        except OSError:
            return ""

    def _state(self) -> dict[str, Any]:
        return run_records.read_state(self._experiment.state)

    def _new_state(self) -> dict[str, Any]:
        """Return state.json if this round has written it."""
        now = self._state()
        return now if now != self._state_before else {}
