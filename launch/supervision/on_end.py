"""Run the command of --on-end with a time limit and without a terminal.

The command cannot change the exit code of the run.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import IO, NamedTuple

from lib.core.errors import one_line
from lib.core.paths import Experiment
from lib.runs import run_records
from lib.runs.events import Event, EventFile
from lib.runs.figures import EXIT_CODES, Status
from lib.runs.run_records import format_time

KILL_S = 3.0  # the most seconds that it takes to kill a command
_TERMINATE_S = 2.0  # the part of KILL_S between SIGTERM and SIGKILL
_DRAIN_S = 0.5
_MOST_OUTPUT = 64 << 10  # bytes of the command's output to keep
_TAIL = 256 << 10  # bytes to read at the end of metrics.jsonl
_LONGEST_REASON = 500


class Ending(NamedTuple):
    """Describes how a launch ended. status: as in state.json. reason: one line, "" if complete."""

    status: str
    exit_code: int
    reason: str = ""


def make_ending(exit_code: int, reason: str) -> Ending:
    """Return the ending of a launch with an exit code."""
    statuses = {code: status for status, code in EXIT_CODES.items()}
    status = statuses.get(exit_code, Status.FAILED)
    return Ending(status, exit_code, "" if status == Status.COMPLETE else reason)


def run_command(
    command: str,
    seconds: float,
    experiment: Experiment,
    ending: Ending,
    environment: dict[str, str],
) -> str:
    """Run a command with `sh -c`, record its outcome as an event, and return a text about it.

    environment: the variables of the command, without those about the run. The call takes at most
    `seconds` + KILL_S, and raises nothing.
    """
    facts = read_facts(experiment, ending)
    began = time.monotonic()
    failure, output = _execute_command(command, seconds, environment | facts)
    duration = round(time.monotonic() - began, 1)
    outcome = f"the command of --on-end {'failed: ' + failure if failure else 'succeeded'}"
    if experiment.root.is_dir():
        reason = {"reason": failure} if failure else {}
        events = EventFile(experiment)
        step = int(facts["STEP"])
        if failure:
            events.add_event(
                Event.ON_END_FAILED, step, status=ending.status, seconds=duration, **reason
            )
        else:
            events.add_event(Event.ON_END, step, status=ending.status, seconds=duration)
        with suppress(OSError):
            experiment.logs.mkdir(exist_ok=True)
            with (experiment.logs / "on_end.log").open("ab", buffering=0) as file:
                file.write(f"{format_time()} {ending.status}: {outcome}\n".encode() + output)
        if output:
            outcome += f"; its output is in {experiment.logs / 'on_end.log'}"
    return f"{outcome} ({duration:g} s)"


def read_facts(experiment: Experiment, ending: Ending) -> dict[str, str]:
    """Return the variables about a run. They come from files, which also exist after a kill."""
    state = run_records.read_state(experiment.state)
    rows = run_records.read_last_rows(experiment.metrics, _TAIL)
    rows = [row for row in rows if "train/loss" in row]
    loss = run_records.mean_loss(rows[-1]) if rows else math.nan
    return {
        "EXP": experiment.root.name,
        "SAVE_DIR": str(experiment.root.parent.absolute()),
        "STATUS": ending.status,
        "STEP": str(max(state.get("step", 0), rows[-1]["step"] if rows else 0)),
        "LOSS": f"{loss:.6g}" if rows else "",
        "EXIT_CODE": str(ending.exit_code),
        "REASON": one_line(ending.reason)[:_LONGEST_REASON],
    }


def _execute_command(
    command: str, seconds: float, environment: dict[str, str]
) -> tuple[str, bytes]:
    """Run a command; return the reason if it failed, else "", and the beginning of its output."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"it cannot be started: {error}", b""
    output = bytearray()
    reader = threading.Thread(target=_drain_pipe, args=(process.stdout, output), daemon=True)
    reader.start()
    try:
        code = process.wait(seconds)
        failure = f"exit code {code}" if code > 0 else ""
        if code < 0:
            failure = f"killed by {_name_signal(-code)}"
    except subprocess.TimeoutExpired:
        failure = f"it did not end within {seconds:g} s and was killed"
        _kill_group(process)
    reader.join(_DRAIN_S)  # a process in the background may keep the pipe open
    return failure, bytes(output)


def _name_signal(number: int) -> str:
    """Return the name of a signal, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _drain_pipe(pipe: IO[bytes], output: bytearray) -> None:
    """Read a pipe to its end, and keep the beginning."""
    with suppress(OSError, ValueError):
        while chunk := os.read(pipe.fileno(), 1 << 16):
            output += chunk[: max(0, _MOST_OUTPUT - len(output))]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all processes of its group."""
    for number, patience in (
        (signal.SIGTERM, _TERMINATE_S),
        (signal.SIGKILL, KILL_S - _TERMINATE_S),
    ):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
