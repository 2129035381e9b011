"""Reads what a run's files say about it: again and again, whole or torn, in any process."""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from launch.runs import at_work, collectives
from lib.core import events, liveness, run_records
from lib.core.errors import UsageError
from lib.core.paths import Experiment, step_of

SILENT_S = 40.0  # a lock that is held is renewed every ten seconds
_COMMIT = "COMMIT.json"
_LOG_TAIL = 16 << 10
_WARNINGS = 6
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (WARNING|ERROR) (.*)")
_HEAVY_START = "Traceback (most recent call last):"

Row = dict[str, Any]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the argument of every command about a run."""
    parser.add_argument(
        "experiment",
        metavar="NAME|DIR",
        help="the run: its name, for outputs/NAME, or its directory",
    )


def require(experiment: Experiment) -> None:
    """Raise UsageError, which names the runs there are, when there is none of that name.

    One that a process prepares for the first time counts, though it has no directory yet.
    """
    if not experiment.root.is_dir() and not at_work.process_on(experiment.root.resolve())[0]:
        beside = experiment.root.parent
        there = sorted(path.name for path in beside.glob("[!.]*") if path.is_dir())
        raise UsageError(
            f"there is no run {experiment.root}",
            found=f"in {beside}: {', '.join(there[:10]) or 'nothing'}",
        )


class GrowingFile:
    """Reads the lines of a file that grows, without a torn last one.

    tail: bytes at the end to begin with at most (default: all).
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path = path
        self._tail = tail
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[bytes], bool]:
        """Return the new lines, and whether they are of another file than those before."""
        is_another = False
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    is_another = True
                    self._offset = max(0, status.st_size - self._tail) if self._tail else 0
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            self._inode = -1
            self._offset = 0
            return [], True
        except OSError:  # the next read may succeed, such as after ESTALE on NFS
            return [], False
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines(), is_another


class JsonLines:
    """Follows a file of JSON lines that grows, without lines that are torn or hold no object."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.rows: list[Row] = []

    def update(self) -> list[Row]:
        """Return all rows, having read only what is new; a file that was replaced is read anew."""
        lines, is_another = self._file.read()
        if is_another:
            self.rows = []
        self.rows += [row for row in map(run_records.parse_row, lines) if row]
        return self.rows


class Standing(NamedTuple):
    """Says how a run stands. is_held: whether a process holds it, as far as can be seen."""

    words: str
    is_held: bool = False


class RunFiles:
    """Reads the files of `outputs/<exp>/` as they are at the last `update`."""

    def __init__(self, root: Path) -> None:
        self.experiment = Experiment(root.parent, root.name)
        self._metrics = JsonLines(self.experiment.metrics)
        self._events = JsonLines(self.experiment.events)
        self._seen: dict[Path, tuple[int, list[str]]] = {}
        self.state: Row = {}
        self.rows: list[Row] = []
        self.events: list[Row] = []
        self.evaluations: list[Row] = []

    def update(self) -> None:
        self.state = run_records.read_state(self.experiment.state)
        every = self._metrics.update()
        self.rows = [row for row in every if "train/loss" in row]
        self.evaluations = [row for row in every if "eval/loss" in row]
        self.events = self._events.update()

    def status(self) -> Standing:
        said = self.state.get("status", "")
        record = run_records.read_state(self.experiment.lock)
        exp = self.experiment
        written = (exp.state, exp.metrics, exp.events, exp.config, exp.rank_log(0))
        quiet = time.time() - max(
            (path.stat().st_mtime for path in written if path.exists()), default=0
        )
        if not said:
            if record and self._is_held(record):
                return Standing("starting", True)
            if self.experiment.config.exists():
                return Standing("stopped before its first step")
            process, _ = at_work.process_on(self.experiment.root)
            return Standing(f"being prepared by process {process}" if process else "not begun")
        if said != "running":
            return Standing(said)
        who = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
        if not record or not self._is_held(record):
            return Standing(
                f"died: {who if record else 'its process'} is gone, and state.json "
                "still says running; the same command goes on from the last checkpoint"
            )
        if quiet > self._patience():
            return Standing(
                f"running, but silent for {quiet / 60:.0f} min: a long save or "
                f"evaluation, or it hangs ({who})",
                True,
            )
        return Standing("running", True)

    def is_over(self) -> bool:
        """Tell whether nothing more is to come."""
        return self.state.get("status") == "complete"

    def ranks(self) -> int:
        """Return the number of ranks of the last start, 0 when it is not known."""
        counts = [e["ranks"] for e in self.events if isinstance(e.get("ranks"), int)]
        return counts[-1] if counts else 0

    def checkpoints(self) -> list[tuple[int, float]]:
        """Return step and age in seconds of the finished checkpoints, the newest last."""
        found = []
        for path in self.experiment.checkpoints.glob(f"step_*/{_COMMIT}"):
            try:
                step = step_of(path.parent.name)
                if step is not None:
                    found.append((step, time.time() - path.stat().st_mtime))
            except OSError:
                continue  # pruned in this moment
        return sorted(found)

    def warnings(self) -> list[str]:
        """Return the last things that want attention: events, and warnings of any rank's log."""
        found = [
            (str(e.get("time", "")).replace("T", " ").rstrip("Z"), _event_line(e))
            for e in self.events
            if e.get("event") in events.PROBLEMS
        ]
        for path in sorted(self.experiment.logs.glob("rank_*.log")):
            rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
            found += [(line[:19], f"rank {rank}: {line[20:]}") for line in self._complaints(path)]
        found += [
            ("", f"stacks of a rank that hung: {path}")
            for path in self._of_this_launch("*.stacks.txt")
        ]
        if said := collectives.waiting(self._of_this_launch("*.collectives.json")):
            found.append(("", said))
        return [
            run_records.one_line(f"{when}  {what}".strip())
            for when, what in sorted(found)[-_WARNINGS:]
        ]

    def _of_this_launch(self, pattern: str) -> list[Path]:
        """Return files of logs/ that are newer than what the last launch wrote first."""

        def changed(path: Path) -> float:
            return path.stat().st_mtime if path.exists() else 0.0

        began = changed(self.experiment.config)
        return [
            path for path in sorted(self.experiment.logs.glob(pattern)) if changed(path) >= began
        ]

    def _complaints(self, path: Path) -> list[str]:
        """Return the warnings at the end of a log, which is read again only when it has grown."""
        try:
            size = path.stat().st_size
            if self._seen.get(path, (-1, []))[0] != size:
                with path.open("rb") as file:
                    file.seek(max(0, size - _LOG_TAIL))
                    text = file.read().decode("utf-8", "replace")
                self._seen[path] = size, _complaints(text)
            return self._seen[path][1]
        except OSError:
            return []

    def _is_held(self, record: Row) -> bool:
        """Tell whether the process that wrote the lock is alive, as far as can be seen here."""
        alive = liveness.is_alive(record)
        try:
            age = time.time() - self.experiment.lock.stat().st_mtime
        except OSError:
            return False
        return age < SILENT_S if alive is None else alive

    def _patience(self) -> float:
        """Return how long the run may be silent, in seconds: several times its usual pause."""
        last = self.rows[-2:]
        if len(last) < 2:
            return 600.0
        usual = (last[1]["step"] - last[0]["step"]) * last[1].get("time/total", 0.0) / 1000
        return max(60.0, 5 * usual)


def _complaints(text: str) -> list[str]:
    """Return `time text` of each warning and error; of a traceback, its last line."""
    found: deque[str] = deque(maxlen=_WARNINGS)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := _LOG_LINE.match(line):
            said = match[3]
            if said.startswith(_HEAVY_START):
                rest = [after for after in lines[number + 1 :] if after.strip()]
                said = next((after for after in rest if not after.startswith(" ")), said)
            found.append(f"{match[1]} {said}")
    return list(found)


def _event_line(event: Row) -> str:
    facts = ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in ("time", "event", "step")
    )
    return f"{event['event']} at step {event['step']:,}" + (f": {facts}" if facts else "")
