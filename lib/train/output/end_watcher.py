"""Run the command of --on-end exactly once when a launch ends, even if rank 0 is killed.

Rank 0 starts a small process, the watcher, which waits for the end of rank 0 and then runs the
command. The watcher does not run it in two cases:

- A launcher that is alive runs it, because only the launcher knows whether a restart follows. If
  the launcher was killed, the watcher acts in its place.
- torchrun starts the ranks again. The watcher waits until torchrun has either done so or ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lib.core import launcher, liveness, log, records, stage, watchdog
from lib.core.errors import EXIT_BUG
from lib.core.figures import EXIT_CODES, Status
from lib.core.lease import ExperimentHeld
from lib.core.paths import OUTPUTS, Experiment
from lib.train.output import on_end
from lib.train.output.on_end import Ending

if TYPE_CHECKING:  # slow to import, and the watcher does not need it
    from lib.train.config import Config

_ROOT = Path(__file__).resolve().parents[3]
# `-m` would search the current directory of the user first.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from lib.train.output import end_watcher; end_watcher.main()"
)
_CHECK_EVERY_S = 0.5
_MARGIN_S = on_end.KILL_S + 5.0  # time to start and kill the command, and to record its outcome
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def start_watcher(config: Config) -> None:
    """Run the command of --on-end when this process ends, or when it is killed.

    Rank 0 waits until the command has ended or was killed; other ranks do nothing.
    """
    if not config.on_end or log.rank() > 0 or config.dry_run or config.prepare_only:
        return
    experiment = Experiment(config.save_dir or OUTPUTS, config.experiment_name)
    stage.call_at_end(Watcher(config, experiment).finish)


def make_launch_ending(code: int, error: BaseException | None) -> Ending | None:
    """Return the ending of a launch; None if another launch trains the run.

    code: the exit code. error: the exception that ends the launch, if any.
    """
    known = error and stage.find_known_error(error)
    if isinstance(known, ExperimentHeld):
        return None
    reason = launcher.headline(str(known or error)) or type(error).__name__
    return on_end.make_ending(code, reason)


class Watcher:
    """Controls the watcher of this process, in a session that no signal to a rank reaches."""

    def __init__(self, config: Config, experiment: Experiment) -> None:
        self._seconds = config.on_end_seconds
        self._process: subprocess.Popen[bytes] | None = None
        try:
            job = {
                "command": config.on_end,
                "seconds": config.on_end_seconds,
                "root": str(experiment.root.absolute()),
                "environment": on_end.build_user_environment(),
                "state": records.read_mapping(experiment.state),
                "rank_0": liveness.process_record(os.getpid()),
                "launcher": json.loads(os.environ.get(launcher.ENDS_RUN, "null")),
                "torchrun": liveness.process_record(os.getppid())
                if launcher.may_restart()
                else None,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._send(job)
        except (OSError, ValueError) as error:
            log.warn(f"the command of --on-end will not run if this process is killed: {error}")

    def finish(self, code: int, error: BaseException | None) -> None:
        """Send the ending of the launch to the watcher and wait for the command. Raises nothing."""
        if self._process is None or self._process.stdout is None:
            return
        watchdog.stop_watchdog()  # the wait below has its own limit
        with suppress(OSError, ValueError, KeyboardInterrupt):
            self._send(make_launch_ending(code, error))
            patience = self._seconds + _MARGIN_S
            has_answer = select.select([self._process.stdout], [], [], patience)[0]
            if text := self._process.stdout.readline() if has_answer else b"":
                log.info(json.loads(text))

    def _send(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()


def main() -> None:
    """Wait for the end of the launch and run the command, in the process of the watcher."""
    for number in _SIGNALS:  # some schedulers signal all processes of a job
        signal.signal(number, lambda number, frame: None)
    messages = open(0, "rb", buffering=0)  # noqa: SIM115
    job = json.loads(messages.readline())
    experiment = Experiment(Path(job["root"]).parent, Path(job["root"]).name)
    ending = _wait_for_ending(job, messages, experiment)
    if ending is None or not _must_run_command(job, ending):
        return
    text = on_end.run_command(
        job["command"], job["seconds"], experiment, ending, job["environment"]
    )
    with suppress(OSError):  # rank 0 was killed
        os.write(1, json.dumps(text).encode() + b"\n")


def _wait_for_ending(
    job: dict[str, Any], messages: IO[bytes], experiment: Experiment
) -> Ending | None:
    """Return the ending of the launch; None if it trained nothing or another launch took over."""
    is_gone = False
    while True:
        if select.select([messages], [], [], 0 if is_gone else _CHECK_EVERY_S)[0]:
            line = messages.readline()
            ending = json.loads(line) if line else _find_ending(job, experiment)
            break
        if is_gone:
            ending = _find_ending(job, experiment)
            break
        is_gone = liveness.is_alive(job["rank_0"]) is False
    if ending is None:
        return None
    ending = Ending(*ending)
    has_trained = records.read_mapping(experiment.state) != job["state"]
    return ending if has_trained or ending.status != Status.COMPLETE else None


def _find_ending(job: dict[str, Any], experiment: Experiment) -> Ending | None:
    """Return the ending of a launch whose rank 0 was killed; None if another launch took over."""
    holder = records.read_mapping(experiment.lock)
    if holder and any(holder.get(key) != value for key, value in job["rank_0"].items()):
        return None
    state = records.read_mapping(experiment.state)
    status = state.get("status")
    if state != job["state"] and status in EXIT_CODES:  # rank 0 was killed after its end
        return Ending(status, EXIT_CODES[status])
    return Ending(Status.FAILED, EXIT_BUG, "rank 0 was killed")


def _must_run_command(job: dict[str, Any], ending: Ending) -> bool:
    """Return whether this process must run the command.

    It must if the launch is over and no launcher is alive to run the command.
    """
    if job["launcher"]:
        return liveness.is_alive(job["launcher"]) is False
    if ending.status == Status.COMPLETE or not job["torchrun"]:
        return True
    os.write(1, b'"the command of --on-end runs if torchrun does not start the ranks again"\n')
    torchrun = job["torchrun"]
    before = _list_children(torchrun["pid"])
    while liveness.is_alive(torchrun):
        if _list_children(torchrun["pid"]) - before:
            return False
        time.sleep(_CHECK_EVERY_S)
    return True


def _list_children(pid: int) -> set[tuple[int, str]]:
    return {
        (child.pid, child.started) for child in liveness.list_processes() if child.parent == pid
    }
