"""A stand-in for stage 04 that ends as a test asks for, and its launcher."""

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


def start_launcher(
    folder: Path,
    *plan: str,
    node: int = 0,
    options: tuple = (),
    arguments: tuple = (),
    within: tuple = (),
) -> subprocess.Popen:
    """Start the launcher of a node.

    plan: code that the stand-in executes in each attempt; the last one repeats. within: command
    prefix of the launcher.
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


def read_attempts(folder: Path, node: int = 0) -> list[str]:
    """Return the launch mark and the options of each attempt of a node's trainer."""
    return (folder / f"attempts_{node}.txt").read_text().splitlines()


def run_launcher(folder: Path, *plan: str, **settings: tuple) -> tuple[int, str, list[str]]:
    """Run a launcher; return its exit code, its output, and the options of each attempt."""
    (folder / "attempts_0.txt").unlink(missing_ok=True)
    process = start_launcher(folder, *plan, **settings)
    output = process.communicate(timeout=90)[0]
    return process.returncode, output, read_attempts(folder)


def find_processes(mark: str) -> list[int]:
    """Return the IDs of the processes whose command line contains a mark."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids
