"""Judge how a round ended, why, and whether to restart."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.core import records
from lib.core.errors import (
    EXIT_ARTIFACT,
    EXIT_BUG,
    EXIT_DISK_FULL,
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USAGE,
)
from lib.core.launcher import KILLED, headline
from lib.core.lease import ExperimentHeld
from lib.runs.figures import EXIT_CODES, Status

EXIT_INTERRUPTED = 128 + signal.SIGINT
ERROR_FILE = "error.json"  # as torchrun names it
_FINAL_CODES = (EXIT_USAGE, EXIT_ARTIFACT, EXIT_DISK_FULL)
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
# Errors of ranks that have lost another rank, besides stage 04's own error classes for this.
_NETWORK_ERROR = re.compile(
    r"^torch\.distributed\.Dist|/gloo/|Connection (?:closed|reset|refused)|Broken pipe|NCCL|"
    r"[Tt]imed? ?out|client socket has failed",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Failure:
    """The error with which a rank ended.

    kind: the class of the error. time: seconds by the clock of its node.
    """

    node: int
    rank: int
    time: float
    code: int
    kind: str
    text: str

    def is_out_of_memory(self) -> bool:
        return self.kind in _OUT_OF_MEMORY

    def is_of_the_network(self) -> bool:
        """Return whether this rank failed because of another rank or of the network."""
        return self.code == EXIT_BUG and (
            self.kind in ("StageError", "Watchdog") or bool(_NETWORK_ERROR.search(self.text))
        )

    def is_held(self) -> bool:
        """Return whether another launch holds the directory of the run."""
        return self.kind == ExperimentHeld.__name__

    def is_final(self, has_begun: bool) -> bool:
        """Return whether this failure ends the run. has_begun: see `judge_round`.

        After a restart, a lock of the experiment that is still held is not final: a node that was
        cut off may hold it for a while.
        """
        return self.code in _FINAL_CODES and not (has_begun and self.is_held())

    def is_killed(self) -> bool:
        """Return whether a signal has ended the rank."""
        return self.kind == KILLED

    def is_bug(self) -> bool:
        return self.code == EXIT_BUG and not (
            self.is_of_the_network() or self.is_out_of_memory() or self.is_killed()
        )

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}: {headline(self.text) or self.kind}"


@dataclass
class NodeOutcome:
    """How a round ended on one node.

    code: torchrun's exit code, None if it is unknown. killed_for_memory: whether the kernel killed
    a process near the end because memory ran out.
    """

    node: int
    code: int | None = None
    failures: list[Failure] = field(default_factory=list)
    killed_for_memory: bool = False

    def note(self) -> dict[str, Any]:
        """Return the outcome as values for a note on the board."""
        return asdict(self)

    @classmethod
    def from_note(cls, note: dict[str, Any]) -> NodeOutcome:
        failures = [Failure(**failure) for failure in note["failures"]]
        return cls(note["node"], note["code"], failures, note["killed_for_memory"])


@dataclass(frozen=True)
class Verdict:
    """The decision after a round. code: exit code of the run and all launchers, None to restart."""

    code: int | None
    why: str


@dataclass
class History:
    """The history of a launch, on which the next verdict depends.

    restarts: their count since the newest checkpoint. bug_at: step of the bug that ended the last
    round, -1 if none did.
    """

    max_restarts: int
    restarts: int = 0
    newest: int = -1
    bug_at: int | None = -1

    def note_newest(self, newest: int) -> None:
        """Reset the count of restarts if a checkpoint is newer than at the last restart."""
        if newest > self.newest:
            self.newest = newest
            self.restarts = 0


def read_failures(logs: Path, node: int) -> list[Failure]:
    """Return the failures that the ranks of this node recorded in torchrun's log directory."""
    failures = []
    for path in logs.rglob(ERROR_FILE):
        with suppress(OSError, ValueError, KeyError, TypeError):
            message = records.read_json(path)["message"]
            failures.append(
                Failure(
                    node,
                    message["rank"],
                    message["time"],
                    message["errorCode"],
                    message["kind"],
                    message["message"],
                )
            )
    return failures


def judge_round(
    nodes: list[NodeOutcome],
    lost: list[int],
    state: dict[str, Any],
    stop: str,
    has_begun: bool,
    history: History,
    since: str,
) -> Verdict:
    """Return the verdict on a round: a restart, or the exit code of the run.

    lost: nodes that are gone or did not report. state: the content of state.json, empty if this
    round did not write it. stop: name of the signal that a launcher received, if any. has_begun:
    whether this launch has trained before this round. since: see `judge_given_up`.
    """
    failures = sorted((f for node in nodes for f in node.failures), key=lambda f: f.time)
    if not lost and all(node.code == EXIT_DONE for node in nodes):
        return Verdict(EXIT_DONE, "done")
    status = state.get("status", "")
    # Ranks save and end if their torchrun is killed, although nobody has stopped the run.
    killed = [] if stop else [node.node for node in nodes if node.code == -signal.SIGKILL]
    if status in EXIT_CODES and not (killed and status == Status.PREEMPTED):
        return Verdict(EXIT_CODES[status], f"the run is {status.replace('_', ' ')}")
    for failure in failures:
        if failure.is_final(has_begun):
            return Verdict(failure.code, str(failure))
        if failure.is_out_of_memory():
            return Verdict(EXIT_USAGE, f"out of memory: {failure}")
    if oom_nodes := [node.node for node in nodes if node.killed_for_memory]:
        return Verdict(
            EXIT_USAGE,
            f"out of memory: the kernel killed a process on node {oom_nodes[0]} (`dmesg` shows "
            "which)",
        )
    if killed:
        failures = [f for f in failures if f.code != EXIT_PREEMPTED]
    if any(f.code == EXIT_PREEMPTED for f in failures):
        return Verdict(EXIT_PREEMPTED, f"stopped by {stop}" if stop else "stopped after saving")
    if stop:
        return judge_stop(stop, failures, bool(state), history.newest, since)
    return _decide_restart(failures, lost, state, history, killed)


def judge_stop(
    stop: str, failures: list[Failure], has_trained: bool, newest: int, since: str = ""
) -> Verdict:
    """Return the verdict on a run that a signal stopped and whose ranks reported no save.

    has_trained: whether a step may be lost. newest: step of the newest checkpoint, -1 without any.
    since: see `judge_given_up`.
    """
    code = signal_code(stop)
    known = (f for f in failures if not (f.is_of_the_network() or f.is_killed()))
    if failure := next(known, None):
        return Verdict(failure.code, f"stopped by {stop}, and the save failed: {failure}")
    if has_trained:
        return Verdict(
            code,
            f"stopped by {stop}, and the ranks ended before they had saved: all training {since} "
            "is lost",
        )
    if newest < 0:
        return Verdict(code, f"stopped by {stop} before the first step: there is nothing to save")
    return Verdict(EXIT_PREEMPTED, f"stopped by {stop}; step {newest:,} was saved before")


def signal_code(name: str) -> int:
    """Return the exit code of a launch that a signal ended before it had saved."""
    return 128 + signal.Signals[name]


def judge_given_up(nodes: list[NodeOutcome], state: dict[str, Any], since: str) -> Verdict | None:
    """Return the verdict on a run whose ranks were killed; None if it had ended by itself before.

    state: see `judge_round`. since: the words that name the checkpoint from which a restart
    continues.
    """
    has_saved = any(failure.code == EXIT_PREEMPTED for node in nodes for failure in node.failures)
    if has_saved or state.get("status", "") in EXIT_CODES:
        return None
    return Verdict(EXIT_INTERRUPTED, f"killed by a second SIGINT: all training {since} is lost")


def _decide_restart(
    failures: list[Failure],
    lost: list[int],
    state: dict[str, Any],
    history: History,
    killed: list[int],
) -> Verdict:
    bug = next((f for f in failures if f.is_bug()), None)
    causes = [f for f in failures if not f.is_of_the_network()] or failures
    first_failure = bug or next(iter(causes), None)
    why = "a rank ended without an error message (see the lines above)"
    if lost:
        why = f"node {lost[0]} is lost"
    elif first_failure:
        why = str(first_failure)
    elif killed:
        why = f"torchrun was killed on node {killed[0]}"
    code = first_failure.code if first_failure else EXIT_BUG
    if bug:
        step = state.get("step")
        if step == history.bug_at:
            return Verdict(code, f"a bug, twice in a row at the same step: {why}")
        history.bug_at = step
    else:
        history.bug_at = -1
    if history.restarts >= history.max_restarts:
        return Verdict(
            code,
            f"no restart is left after {history.restarts} without a newer checkpoint: {why}"
            if history.max_restarts
            else why,
        )
    history.restarts += 1
    return Verdict(None, why)
