"""A stand-in for stage 04 under torchrun, which ends as it is told, and the launcher above it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SUPERVISE = ROOT / "launch" / "supervise.py"
TRAINER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

node, root = int(os.environ["STAND_IN_NODE"]), Path("outputs/run")
(root / "checkpoints").mkdir(parents=True, exist_ok=True)
attempts = Path(f"attempts_{node}.txt")
with attempts.open("a") as file:
    file.write(os.environ["LAUNCH_MARK"] + " " + " ".join(sys.argv[1:]) + "\\n")
plan = json.loads(Path(f"plan_{node}.json").read_text())
number = len(attempts.read_text().splitlines())
if node == 0:
    (root / "config.yaml").write_text(f"launch: {number}")

def state(status, step=0):
    if node == 0:
        (root / "state.json").write_text(json.dumps({"status": status, "step": step, "n": number}))

def fail(kind, code, text):
    path = Path(os.environ["PET_LOG_DIR"]) / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"message": {"message": text, "errorCode": code, "kind": kind,
                                            "rank": node, "time": time.time()}}))
    sys.exit(1)

def sleep_on(mark):
    subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
                      "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
                      f"print('asleep', flush=True); time.sleep(600) # {mark}"],
                     start_new_session=True, stdout=subprocess.PIPE).stdout.readline()

exec(plan[min(number, len(plan)) - 1])
"""
COMPLETE = "state('complete', 9)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def start(
    folder: Path,
    *plan: str,
    node: int = 0,
    options: tuple = (),
    arguments: tuple = (),
    within: tuple = (),
) -> subprocess.Popen:
    """Start the launcher of a node.

    plan: what the trainer there does in each attempt, the last one for good. within: command that
    runs the launcher.
    """
    (folder / "04_train_fsdp.py").write_text(TRAINER)
    (folder / f"plan_{node}.json").write_text(json.dumps(plan))
    return subprocess.Popen(
        [
            *within,
            sys.executable,
            SUPERVISE,
            "--backoff",
            "0.1",
            *map(str, options),
            "--",
            sys.executable,
            "04_train_fsdp.py",
            "-e",
            "run",
            "-d",
            "corpus",
            *arguments,
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "STAND_IN_NODE": str(node)},
    )


def attempts(folder: Path, node: int = 0) -> list[str]:
    """Return the mark and the options that the trainer of a node got in each attempt."""
    return (folder / f"attempts_{node}.txt").read_text().splitlines()


def run(folder: Path, *plan: str, **how: tuple) -> tuple[int, str, list[str]]:
    """Return exit code, output, and the options of each attempt of this launch."""
    (folder / "attempts_0.txt").unlink(missing_ok=True)
    process = start(folder, *plan, **how)
    output = process.communicate(timeout=90)[0]
    return process.returncode, output, attempts(folder)


def processes(mark: str) -> list[int]:
    """Return the processes whose command line holds a mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
