"""Read the files of a run from any process, also while it writes them."""

from __future__ import annotations

import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import lease, liveness, records
from lib.core.errors import UsageError, one_line
from lib.core.paths import Experiment
from lib.runs import collectives, events, run_records
from lib.runs.figures import Status
from lib.runs.growing_files import JsonLines
from lib.runs.processes import find_process

_ABANDONED_S = lease.PATIENCE_S + 5  # without an update, the lock of another machine is abandoned
_LOG_TAIL = 16 << 10  # bytes
_MAX_WARNINGS = 6
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (WARNING|ERROR) (.*)")
_TRACEBACK = "Traceback (most recent call last):"

Row = dict[str, Any]


def require_run(experiment: Experiment) -> None:
    """Raise UsageError if there is no such run; the error lists the existing ones.

    A run exists if it has a directory, or if a process of this machine is preparing it.
    """
    if not experiment.root.is_dir() and not find_process(experiment.root.resolve()):
        parent = experiment.root.parent
        names = sorted(path.name for path in parent.glob("[!.]*") if path.is_dir())
        raise UsageError(
            f"there is no run {experiment.root}",
            found=f"in {parent}: {one_line(', '.join(names[:10])) or 'nothing'}",
        )


class RunStatus(NamedTuple):
    """The status of a run, as a text and as a word. is_held: whether a process holds its lock."""

    text: str
    word: str
    is_held: bool = False


class RunFiles:
    """The files of `outputs/<exp>/` as they were at the last `update`.

    tail: bytes of metrics.jsonl and events.jsonl to begin with (default: the whole files).
    """

    def __init__(self, root: Path, tail: int | None = None) -> None:
        self.experiment = Experiment(root.parent, root.name)
        self._metrics = JsonLines(self.experiment.metrics, tail)
        self._events = JsonLines(self.experiment.events, tail)
        self._log_warnings: dict[Path, tuple[int, list[str]]] = {}  # size of the log, warnings
        self.state: Row = {}
        self.rows: list[Row] = []
        self.events: list[Row] = []
        self.evaluations: list[Row] = []

    def update(self) -> None:
        """Read the changes since the last call."""
        self.state = run_records.read_state(self.experiment.state)
        rows = self._metrics.update()
        self.rows = [row for row in rows if "train/loss" in row]
        self.evaluations = [row for row in rows if "eval/loss" in row]
        self.events = self._events.update()

    def status(self) -> RunStatus:
        """Return the status of the run, such as starting, running, silent, complete or died."""
        status = self.state.get("status", "")
        record = run_records.read_state(self.experiment.lock)
        if not status:
            return self._status_before_first_step(record)
        if status != Status.RUNNING:
            return RunStatus(status, status.replace("_", " "))
        holder = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
        if not record or not self._is_held(record):
            return RunStatus(
                f"died: {holder if record else 'its process'} is gone, and state.json "
                "still says running; the same command resumes from the last checkpoint",
                "died",
            )
        silence = self._silence()
        if silence > self._longest_silence():
            return RunStatus(
                f"running, but silent for {silence / 60:.0f} min: a long save or "
                f"evaluation, or a hang ({holder})",
                "silent",
                True,
            )
        return RunStatus(status, status, True)

    def _status_before_first_step(self, record: Row) -> RunStatus:
        if record and self._is_held(record):
            return RunStatus("starting", "starting", True)
        if self.experiment.state.exists():
            return RunStatus("unknown: state.json cannot be read", "unreadable")
        if self.experiment.config.exists():
            return RunStatus("stopped before its first step", "not begun")
        if process := find_process(self.experiment.root):
            return RunStatus(f"being prepared by process {process.pid}", "preparing")
        return RunStatus("not begun", "not begun")

    def is_complete(self) -> bool:
        """Return whether the run has done all its steps."""
        return self.state.get("status") == Status.COMPLETE

    def ranks(self) -> int:
        """Return the number of ranks of the last launch, 0 if it is unknown."""
        counts = [event["ranks"] for event in self.events if isinstance(event.get("ranks"), int)]
        return counts[-1] if counts else 0

    def checkpoints(self) -> list[tuple[int, float]]:
        """Return the step and the age in seconds of each complete checkpoint, the newest last."""
        checkpoints = []
        with suppress(OSError):
            for step, path in reversed(run_records.list_possible_commits(self.experiment)):
                with suppress(OSError):  # it is incomplete or unreadable, or was deleted just now
                    checkpoints.append((step, time.time() - path.stat().st_mtime))
        return checkpoints

    def warnings(self) -> list[str]:
        """Return the newest problems: events, and warnings and errors in the log of any rank."""
        problems = [
            (str(event.get("time", "")).replace("T", " ").rstrip("Z"), _format_event(event))
            for event in self.events
            if event.get("event") in events.PROBLEMS
        ]
        for path in sorted(self.experiment.logs.glob("rank_*.log")):
            rank = path.stem.removeprefix("rank_").lstrip("0") or "0"
            lines = self._warnings_in_log(path)
            problems += [(line[:19], f"rank {rank}: {line[20:]}") for line in lines]
        problems += [
            ("", f"stacks of a rank that hung: {path}")
            for path in self._files_of_launch("*.stacks.txt")
        ]
        if hang := collectives.describe_hang(self._files_of_launch("*.collectives.json")):
            problems.append(("", hang))
        newest = sorted(problems)[-_MAX_WARNINGS:]
        return [one_line(f"{time}  {text}".strip()) for time, text in newest]

    def _files_of_launch(self, pattern: str) -> list[Path]:
        """Return files of logs/ that are newer than config.yaml, which a launch writes first."""

        def modified(path: Path) -> float:
            return path.stat().st_mtime if path.exists() else 0.0

        began = modified(self.experiment.config)
        paths = sorted(self.experiment.logs.glob(pattern))
        return [path for path in paths if modified(path) >= began]

    def _warnings_in_log(self, path: Path) -> list[str]:
        """Return the warnings at the end of a log, which is read again only if it has grown."""
        try:
            size = path.stat().st_size
            if self._log_warnings.get(path, (-1, []))[0] != size:
                with records.open_regular(path) as file:
                    file.seek(max(0, size - _LOG_TAIL))
                    text = file.read().decode("utf-8", "replace")
                self._log_warnings[path] = size, _parse_warnings(text)
            return self._log_warnings[path][1]
        except OSError:
            return []

    def _is_held(self, record: Row) -> bool:
        """Return whether the process that wrote the lock is alive, as far as this machine can see.

        For a process on another machine, the age of the lock decides, since its holder renews it.
        """
        alive = liveness.is_alive(record)
        try:
            age = time.time() - self.experiment.lock.stat().st_mtime
        except OSError:
            return False
        return age < _ABANDONED_S if alive is None else alive

    def _silence(self) -> float:
        """Return for how many seconds rank 0 has written nothing."""
        exp = self.experiment
        files = (exp.state, exp.metrics, exp.events, exp.config, exp.rank_log(0))
        newest = max((path.stat().st_mtime for path in files if path.exists()), default=0)
        return time.time() - newest

    def _longest_silence(self) -> float:
        """Return how long the run may be silent, in seconds: five times the time between rows."""
        last_rows = self.rows[-2:]
        if len(last_rows) < 2:
            return 600.0
        interval = (
            (last_rows[1]["step"] - last_rows[0]["step"])
            * last_rows[1].get("time/total", 0.0)
            / 1000
        )
        return max(60.0, 5 * interval)


def _parse_warnings(text: str) -> list[str]:
    """Return the last warnings and errors in a log as `time text`; of tracebacks, the last line."""
    warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := _LOG_LINE.match(line):
            message = match[3]
            if message.startswith(_TRACEBACK):
                rest = [next_line for next_line in lines[number + 1 :] if next_line.strip()]
                message = next(
                    (next_line for next_line in rest if not next_line.startswith(" ")), message
                )
            warnings.append(f"{match[1]} {message}")
    return list(warnings)


def _format_event(event: Row) -> str:
    fields = ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in ("time", "event", "step")
    )
    return f"{event['event']} at step {event['step']:,}" + (f": {fields}" if fields else "")
